"""The offset index next to a shard: the byte range of each sample, for loaders that use `pread`.

An index uses 30 bytes per sample or, if the samples have sets of labels, 30 bytes per sample and 4
bytes per label. The keys are not stored here, because the tar header of each sample contains its
key. webdataset readers do not need the index, because the tar is self-contained.
`data/shards/split_index.py` joins the indices of a split.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from isal import isal_zlib
from safetensors.numpy import save

from data.messages import SHARD_AGAIN
from data.remote.config import address
from data.remote.fetch import read_file
from data.shards.manifest import ShardInfo
from data.skipped import Skipped
from data.tars.headers import BLOCK

FORMAT, FORMAT_OF_SETS = 1, 2
LABEL_EXTENSION = "cls"
INDEX_SUFFIX = ".index.safetensors"
# The maximum size of the header, which contains the lists, and the sizes of an entry and a label.
_MAX_BYTES = (1 << 24, 30, 4)

Label = int | Sequence[int]
"""The label of a sample or, if samples have sets of labels, its labels."""


@dataclass(frozen=True)
class ShardIndex:
    """The locations of N samples. Columns: 0 is the sample, and 1 is its `.cls` member.

    blocks: the offset of the first byte in blocks of 512 bytes, uint32 [N, 2]. sizes: the sizes in
    bytes, uint32 [N, 2]. crc32: the checksums, uint32 [N, 2]. extension: the positions in
    `extensions`, uint8 [N, 2]. labels: the labels, int32 [N] or, with `offsets`, those of all
    samples, int32 [L]. offsets: None, or where the labels of each sample, which ascend, begin and
    the last ones end, int64 [N + 1]. skipped: the samples that the writer skipped.
    """

    info: ShardInfo
    extensions: tuple[str, ...]
    blocks: np.ndarray
    sizes: np.ndarray
    crc32: np.ndarray
    extension: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray | None = None
    skipped: tuple[Skipped, ...] = ()

    def labels_of(self, row: int) -> list[int]:
        """Return the labels of one sample."""
        at = self.offsets
        found = self.labels[row : row + 1] if at is None else self.labels[at[row] : at[row + 1]]
        return found.tolist()


class Entry(NamedTuple):
    """A member's location in the tar (in blocks of 512 bytes), its size in bytes and its crc32."""

    extension: str
    block: int
    size: int
    crc32: int


class IndexBuilder:
    """Collects the entries of one shard while it is written. This requires as much memory as the
    index.
    """

    def __init__(self) -> None:
        self._extensions: list[str] = []
        self._places, self._labels, self._extension = array("I"), array("i"), array("B")
        self._set_sizes = array("I")

    def add(self, members: dict[str, bytes], *, offset: int, sample: str, label: Label) -> int:
        """Add `members` (extension -> bytes), which are written in sorted order from `offset`.

        label: a set of labels must be in ascending order. Returns the offset after the members.
        """
        entries = {}
        for extension in sorted(members):
            data = members[extension]
            crc32 = isal_zlib.crc32(data)
            entries[extension] = Entry(extension, offset // BLOCK + 1, len(data), crc32)
            offset += BLOCK + -(-len(data) // BLOCK) * BLOCK
        self.add_entries(entries[sample], entries[LABEL_EXTENSION], label=label)
        return offset

    def add_entries(self, sample: Entry, label_member: Entry, *, label: Label) -> None:
        """Add a sample whose two members can be anywhere in the tar.

        Raises ValueError if only some of the samples have sets of labels.
        """
        for entry in (sample, label_member):
            if entry.extension not in self._extensions:
                self._extensions.append(entry.extension)
            self._extension.append(self._extensions.index(entry.extension))
        for entry in (label_member, sample):
            self._places.extend((entry.block, entry.size, entry.crc32))
        if is_set := isinstance(label, Sequence):
            self._labels.extend(label)
            self._set_sizes.append(len(label))
        else:
            self._labels.append(label)
        if len(self._set_sizes) != is_set * len(self):
            raise ValueError(
                f"label {label} is {'a set' if is_set else 'a number'}, unlike those of other "
                "samples: create samples with either sets of labels or one label"
            )

    def relabel(self, labels: Sequence[int]) -> None:
        """Replace each label i with `labels[i]`."""
        self._labels = array("i", [labels[label] for label in self._labels])
        end = 0
        for size in self._set_sizes:
            start, end = end, end + size
            self._labels[start:end] = array("i", sorted(self._labels[start:end]))

    def __len__(self) -> int:
        return len(self._extension) // 2

    @property
    def _num_labels(self) -> int | None:
        """The number of labels, if the samples have sets of labels."""
        return len(self._labels) if self._set_sizes else None

    def info(self, file: str, split: str, *, size: int, sha256: str) -> ShardInfo:
        """Return the entry of the shard in the manifest. size: of the tar, in bytes."""
        return ShardInfo(
            file=file,
            split=split,
            samples=len(self),
            bytes=size,
            sha256=sha256,
            index_crc32=_crc32(self._extensions, self._tensors()),
            labels=self._num_labels,
        )

    def to_bytes(self, info: ShardInfo, *, skipped: Sequence[Skipped] = ()) -> bytes:
        """Return the content of the index file.

        The arguments are included for a resumed run, which then does not read the shard again.
        """
        about: dict[str, Any] = {
            "format": FORMAT if info.labels is None else FORMAT_OF_SETS,
            "shard": info.model_dump(),
            "extensions": self._extensions,
        }
        if skipped:
            about["skipped"] = skipped
        if len(text := json.dumps(about)) > _MAX_BYTES[0] // 2:
            raise ValueError(
                f"{info.file}: {len(skipped):,} skipped samples are too many for the index of a "
                "shard: lower --samples-per-shard"
            )
        # Use a single metadata key, because safetensors writes several keys in random order.
        return save(self._tensors(), metadata={"kway": text})

    def _tensors(self) -> dict[str, np.ndarray]:
        places = np.array(self._places, np.uint32).reshape(-1, 2, 3).transpose(1, 2, 0)
        extension = np.array(self._extension, np.uint8).reshape(-1, 2).transpose()
        tensors = {
            "places": places,
            "set_sizes": np.array(self._set_sizes, np.uint32),
            "labels": np.array(self._labels, np.int32),
            "extension": extension,
        }
        # safetensors ignores strides, so a transposed view must be copied first.
        shapes = _shapes(len(self), self._num_labels)
        return {name: np.ascontiguousarray(tensors[name]) for name in shapes}


def _shapes(
    num_samples: int, num_labels: int | None
) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """Return the tensors in the order in which safetensors writes them: (safetensors dtype, numpy
    dtype, shape).

    places: block, size and crc32, first of the `.cls` member and then of the sample. set_sizes: the
    number of labels of each sample, only with sets of labels. extension: first of the sample and
    then of the `.cls` member.
    """
    shapes: dict[str, tuple[str, str, tuple[int, ...]]] = {
        "places": ("U32", "<u4", (2, 3, num_samples)),
        "set_sizes": ("U32", "<u4", (num_samples,)),
        "labels": ("I32", "<i4", (num_samples if num_labels is None else num_labels,)),
        "extension": ("U8", "u1", (2, num_samples)),
    }
    if num_labels is None:
        del shapes["set_sizes"]
    return shapes


def _crc32(extensions: Sequence[str], tensors: Mapping[str, np.ndarray]) -> int:
    crc = isal_zlib.crc32(json.dumps(list(extensions)).encode())
    for tensor in tensors.values():
        crc = isal_zlib.crc32(tensor.data, crc)
    return crc


def index_path(shard: Path) -> Path:
    """Map `train-000000.tar` to `train-000000.index.safetensors`, in the same folder."""
    return shard.with_name(shard.name.removesuffix(".tar") + INDEX_SUFFIX)


def read_index(folder: Path | str, shard: ShardInfo, *, attempts: int) -> ShardIndex:
    """Read the index of a shard in a folder at a path or URL.

    Raises FileNotFoundError if the index is missing, and ValueError if it is damaged.
    """
    name = index_path(Path(shard.file)).name
    where, (header, entry, label) = address(folder, name), _MAX_BYTES
    max_bytes = header + entry * shard.samples + label * (shard.labels or 0)
    try:
        return read_file(folder, name, parse_index, attempts=attempts, max_bytes=max_bytes)
    except FileNotFoundError:
        raise FileNotFoundError(f"{where} is missing: copy it, or {SHARD_AGAIN}") from None
    except ValueError as error:
        reason = str(error).removeprefix(where).strip()
        raise ValueError(f"{where} {reason}: copy it again, or {SHARD_AGAIN}") from error


def parse_index(content: bytes) -> ShardIndex:
    """Return the index in the bytes of a file. Raises ValueError, with only the reason, if it is
    damaged or was written by a different version of kway.
    """
    try:
        return _parsed(content)
    # RecursionError: deeply nested brackets
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"is damaged ({reason})") from error


def _parsed(content: bytes) -> ShardIndex:
    # A safetensors file begins with the length of its header, which is JSON.
    start = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:start])
    about = json.loads(header["__metadata__"]["kway"])
    if (found := about.get("format")) not in (FORMAT, FORMAT_OF_SETS):
        raise ValueError(
            f"has format {found}, but this version of kway reads {FORMAT} and {FORMAT_OF_SETS}"
        )
    info = ShardInfo.model_validate(about["shard"])
    extensions = tuple(str(extension) for extension in about["extensions"])
    tensors = {}
    for name, (dtype, kind, shape) in _shapes(info.samples, info.labels).items():
        entry = header[name]
        first, end = entry["data_offsets"]
        if entry["dtype"] != dtype or entry["shape"] != [*shape] or first < 0:
            raise ValueError(f"{name} is {entry['dtype']} {entry['shape']} at {first}")
        tensors[name] = np.frombuffer(content[start + first : start + end], kind).reshape(shape)
    if _crc32(extensions, tensors) != info.index_crc32:
        raise ValueError("its checksum does not match")
    if tensors["extension"].max() >= len(extensions) or tensors["places"][:, 0].min() < 1:
        raise ValueError("an entry is out of range")
    blocks, sizes, crc32 = tensors["places"][::-1].transpose(1, 2, 0)
    extension = tensors["extension"].transpose()
    labels, offsets = tensors["labels"], None
    if (set_sizes := tensors.get("set_sizes")) is not None:
        offsets = np.concatenate([[0], np.cumsum(set_sizes, dtype=np.int64)])
        if offsets[-1] != len(labels):
            raise ValueError(f"it has {len(labels)} labels, but its sets have {offsets[-1]}")
    skipped = tuple(Skipped(*one) for one in about.get("skipped", ()))
    places = blocks, sizes, crc32, extension
    return ShardIndex(info, extensions, *places, labels, offsets, skipped)
