"""Reads the samples of one webdataset tar sequentially, without an index or checksums.

After a broken connection or a transient disk error, reading resumes at the byte where it stopped.
Incomplete samples are reported by name. `data/loading/stream_reader.py` determines which tars are
read, and when.
"""

import hashlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from data.loading.substitute import Substitute
from data.remote.config import is_url
from data.remote.fetch import REMEDY, pieces, resumed
from data.tars.headers import Fault, walk_bytes
from data.tars.labels import LABEL_EXTENSIONS, ClassList, label_text
from data.tars.listing import check_plain
from data.tars.samples import Group, add_member, pick

_PIECE = 1 << 20
# Images and texts for training are smaller. This bounds the number of bytes that are read because
# of a damaged header.
_MAX_MEMBER = 1 << 28


class StreamSample(NamedTuple):
    """A sample of a tar. `number` identifies it; `name` is its shard and key."""

    number: int
    name: str
    data: bytes
    label: int


@dataclass(frozen=True)
class TarReader:
    """Settings for reading tars.

    endings: the extensions that a sample can have, in order of preference. label_field: the field
    of `<key>.json` that contains the label. classes: a map from labels to classes. attempts: the
    maximum number of consecutive attempts that receive no new data.
    """

    endings: tuple[str, ...]
    label_field: str
    classes: ClassList
    attempts: int

    def samples(self, address: str) -> Iterator[StreamSample | Substitute]:
        """Yield every complete sample of a tar, and a `Substitute` for each skipped one.

        address: a path or URL. Raises FileNotFoundError, PermissionError or OSError if the tar
        cannot be read to its end, and ValueError if it is compressed.
        """
        tar = ForwardBytes(_pieces(address, self.attempts))
        check_plain(address, tar.read(0, 8))
        groups: list[Group] = []
        held: dict[int, bytes] = {}
        empty = True
        for found in walk_bytes(tar):
            empty = False
            if isinstance(found, Fault):
                yield _skipped(address, f"at byte {found.offset:,}", found.what)
                continue
            if not add_member(groups, found):
                continue
            if len(groups) > 1:
                yield self._sample(address, groups.pop(0), held)
                held.clear()
            if next(reversed(groups[0].members)) in (*self.endings, *LABEL_EXTENSIONS):
                held[found.offset] = tar.read(found.offset, found.size)
        if groups:
            yield self._sample(address, groups[0], held)
        elif empty:
            # Checkpoints contain this number, so the hashed text must not change.
            number = _number(f"{address}: the whole of it")
            yield Substitute(number, None, f"{address}: the tar is empty")

    def _sample(
        self, address: str, group: Group, held: dict[int, bytes]
    ) -> StreamSample | Substitute:
        try:
            (_, sample), (ending, label) = pick(group, self.endings)
            for member in (sample, label):
                if len(held[member.offset]) < member.size:
                    raise ValueError(
                        f"{member.name} has {member.size:,} bytes, over the limit of "
                        f"{_MAX_MEMBER:,} for streams"
                    )
            text = label_text(ending, held[label.offset], self.label_field)
            class_label = self.classes.label(text)
        except ValueError as error:
            return _skipped(address, group.key, str(error))
        name = f"{address}: {group.key}"
        return StreamSample(_number(name), name, held[sample.offset], class_label)


class ForwardBytes:
    """Access by offset to a stream of bytes that can only be read forward.

    Bytes before the last offset that was read are discarded. A range of more than `_MAX_MEMBER`
    bytes is also discarded; reading it returns no bytes.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._held = bytearray()
        self._start = 0

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, or fewer at the end or if the bytes were discarded."""
        if offset < self._start:
            return b""
        self._drop(offset)
        self._fill(offset + size)
        with memoryview(self._held) as held, held[:size] as wanted:
            return bytes(wanted)

    def reaches(self, offset: int) -> bool:
        """Return whether the stream contains all bytes before `offset`."""
        if offset - self._start > _MAX_MEMBER:
            self._drop(offset)
        self._fill(offset)
        return offset <= self._start + len(self._held)

    def _drop(self, offset: int) -> None:
        """Discard everything before `offset`."""
        while self._start + len(self._held) < offset and (piece := next(self._pieces, None)):
            self._start += len(self._held)
            self._held = bytearray(piece)
        passed = min(offset - self._start, len(self._held))
        del self._held[:passed]
        self._start += passed

    def _fill(self, end: int) -> None:
        while self._start + len(self._held) < end and (piece := next(self._pieces, None)):
            self._held += piece


def _pieces(address: str, attempts: int) -> Iterator[bytes]:
    """Yield the content of a file at a path or URL. Transient errors are retried."""
    opened = pieces if is_url(address) else _local_pieces
    try:
        yield from resumed(address, opened=opened, attempts=attempts, remedy=REMEDY)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{address} does not exist: check data.stream.shards, or copy the file"
        ) from error


def _local_pieces(path: str, start: int) -> Generator[bytes, None, None]:
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while piece := file.read(_PIECE):
            yield piece


def _skipped(address: str, location: str, reason: str) -> Substitute:
    name = f"{address}: {location}"
    return Substitute(_number(name), None, f"{name}: {reason}")


def _number(name: str) -> int:
    """Return a 63-bit hash that identifies a sample on every rank and in every run."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
