"""The index of a split: one flat file with the location and label of every sample, in shard order.

It is built from the indices of the shards once per machine, kept in the cache folder and mapped
into memory, so all processes of a machine share it, and a lookup does not depend on the number of
shards.
"""

import hashlib
import json
import logging
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from isal import isal_zlib

from data.messages import SHARD_AGAIN
from data.remote.cache import Cache
from data.remote.config import CacheConfig
from data.retry import TransientError, retried
from data.shards.index import ShardIndex, index_path, read_index
from data.shards.shard_files import Shard

_log = logging.getLogger("kway.data")

_LAYOUT = b"2"  # part of the name of the file
_ABOUT_BYTES = 1 << 16  # of JSON after the columns: their checksum, and the extensions
_CHUNK = 1 << 22
_THREADS = 16
_REPORT_SECONDS = 5.0

# Returns the converted labels of shard number i of the split, int32 [n].
Relabel = Callable[[int, ShardIndex], np.ndarray]


class SplitIndex(NamedTuple):
    """The locations of the N samples of a split.

    places: the first block of 512 bytes in the shard, the size in bytes and the crc32 of each
    sample, uint32 [N, 3]. labels: int32 [N] or, with `offsets`, those of all samples, int32 [L].
    extension: the position in `extensions`, uint8 [N]. offsets: None or, if the samples have sets
    of labels, where the labels of each begin and the last ones end, int64 [N + 1].
    """

    places: np.ndarray
    labels: np.ndarray
    extension: np.ndarray
    extensions: tuple[str, ...]
    offsets: np.ndarray | None = None


def index_bytes(shards: Sequence[Shard]) -> int:
    """Return the size of the file."""
    return int(_starts(shards)[-1, -1]) + _ABOUT_BYTES


def open_split_index(
    shards: Sequence[Shard], relabel: Relabel, key: bytes, config: CacheConfig
) -> SplitIndex:
    """Return the index of `shards`.

    key: identifies what `relabel` does. Without a writable cache folder, the index is kept in the
    memory of this process. Raises the errors of `relabel`, and FileNotFoundError or ValueError if
    the index of a shard is missing or damaged, or does not match the manifest.
    """
    digest = hashlib.sha256(_LAYOUT + key)
    for shard in shards:
        digest.update(shard.info.model_dump_json().encode())
        if isinstance(shard.folder, Path):  # notice a replaced index
            digest.update(_signature(index_path(shard.folder / shard.info.file)))
    name = f"{digest.hexdigest()}.split-index"
    write = partial(_write, shards=shards, relabel=relabel, config=config)

    def read(path: Path) -> SplitIndex:
        with path.open("rb") as file:
            # Read the file for its checksum instead of mapping it, so that only the pages that are
            # used later are in the memory of this process.
            crc32 = _crc32(file, file.seek(-4, os.SEEK_END))
            if file.read() != crc32:
                _log.warning("%s is damaged: building it again", path)
                raise ValueError(f"{path} is damaged: check the disk")
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        content.madvise(mmap.MADV_RANDOM)  # otherwise, a lookup also reads nearby pages
        return _read(content, shards)

    try:
        cache = Cache(config.folder, config.max_bytes)
        return cache.read(name, write, read, size=index_bytes(shards))
    except (FileNotFoundError, TransientError):
        raise
    except OSError as error:
        _log.warning("%s; keeping the index of %s in memory", error, shards[0].folder)
    in_memory = BytesIO()
    write(in_memory)
    return _read(in_memory.getbuffer(), shards)


def _write(file: IO[bytes], shards: Sequence[Shard], relabel: Relabel, config: CacheConfig) -> None:
    """Write the index of `shards` to `file`, which is empty or has its final size."""
    starts, num_labels = _starts(shards), 0
    extensions: dict[str, int] = {}
    for number, index in enumerate(_indices(shards, config)):
        numbers = [extensions.setdefault(name, len(extensions)) for name in index.extensions]
        columns = [
            np.stack([index.blocks[:, 0], index.sizes[:, 0], index.crc32[:, 0]], axis=1),
            relabel(number, index),
            np.array(numbers, np.uint8)[index.extension[:, 0]],
        ]
        if index.offsets is not None:
            columns.insert(0, index.offsets[1:] + num_labels)
            num_labels += len(index.labels)
        for start, column in zip(starts[:, number].tolist(), columns, strict=True):
            file.seek(start)
            file.write(np.ascontiguousarray(column).data)
    end = int(starts[-1, -1])
    file.seek(end)
    file.write(json.dumps(list(extensions)).encode().ljust(_ABOUT_BYTES - 4))
    crc32 = _crc32(file, end + _ABOUT_BYTES - 4)
    file.write(crc32)


def _crc32(file: IO[bytes], size: int) -> bytes:
    """Return the checksum of the first `size` bytes, after which the file is positioned."""
    crc32 = 0
    file.seek(0)
    for start in range(0, size, _CHUNK):
        crc32 = isal_zlib.crc32(file.read(min(_CHUNK, size - start)), crc32)
    return crc32.to_bytes(4, "little")


def _read(content: mmap.mmap | memoryview, shards: Sequence[Shard]) -> SplitIndex:
    """Return views of the bytes of an intact index."""
    starts = _starts(shards)
    bounds = [*starts[:, 0].tolist(), int(starts[-1, -1])]
    flat = np.frombuffer(content, np.uint8)
    *ends, places, labels, extension = (flat[start:end] for start, end in pairwise(bounds))
    return SplitIndex(
        places.view("<u4").reshape(-1, 3),
        labels.view("<i4"),
        extension,
        tuple(json.loads(bytes(content[bounds[-1] : -4]))),
        flat[: bounds[1]].view("<i8") if ends else None,
    )


def _starts(shards: Sequence[Shard]) -> np.ndarray:
    """Return where in the file each shard begins, and the last one ends, in each column, int64
    [columns, shards + 1].

    The columns are those of `SplitIndex`. With sets of labels, `offsets` comes first. Its first
    element, which is 0, precedes those of the shards.
    """
    samples = np.array([shard.info.samples for shard in shards], np.int64)
    if shards[0].info.labels is None:
        first, sizes = 0, [12 * samples, 4 * samples, samples]
    else:
        labels = np.array([shard.info.labels for shard in shards], np.int64)
        first, sizes = 8, [8 * samples, 12 * samples, 4 * labels, samples]
    ends = first + np.cumsum(sizes).reshape(len(sizes), -1)
    return np.concatenate([np.append(first, ends[:-1, -1])[:, None], ends], axis=1)


def _indices(shards: Sequence[Shard], config: CacheConfig) -> Iterator[ShardIndex]:
    """Yield the indices of the shards. Threads read several at the same time."""
    reported = time.monotonic()
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            read = partial(_index, attempts=config.attempts)
            for number, found in enumerate(pool.map(read, shards), start=1):
                yield found
                if time.monotonic() - reported > _REPORT_SECONDS:
                    reported = time.monotonic()
                    line = f"{shards[0].folder}: read {number:,} of {len(shards):,} indices"
                    print(line, file=sys.stderr, flush=True)
        finally:
            pool.shutdown(cancel_futures=True)


def _index(shard: Shard, attempts: int) -> ShardIndex:
    index = read_index(shard.folder, shard.info, attempts=attempts)
    if index.info != shard.info:
        raise ValueError(
            f"the index of {shard.address} does not match the manifest: copy it again, or "
            f"{SHARD_AGAIN}"
        )
    return index


def _signature(path: Path) -> bytes:
    """Return what changes when a file is replaced."""
    try:
        about = retried(str(path), path.stat)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: copy it, or {SHARD_AGAIN}") from None
    return f"{about.st_size} {about.st_mtime_ns} {about.st_ino}".encode()
