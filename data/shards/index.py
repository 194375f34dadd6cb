"""The offset index next to a shard: the byte range of each sample, for loaders that use `pread`.

An index uses 30 bytes per sample. Training reads 17 of these bytes, which are contiguous. The file
is memory-mapped, so all processes on a machine share it. The keys are not stored here, because the
tar header of each sample contains its key. webdataset readers do not need the index, because the
tar is self-contained.
"""

import json
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from isal import isal_zlib
from safetensors.numpy import save

from data.messages import SHARD_AGAIN
from data.shards.manifest import ShardInfo
from data.shards.mapped import disable_readahead, mapped
from data.tars.headers import BLOCK, member_name

FORMAT = 1
LABEL_EXTENSION = "cls"
_MAX_HEADER = 1 << 20
# The maximum size of the header, with names of up to 255 characters, and the size of each entry.
_MAX_BYTES = (1 << 16, 30)
HEADER_BYTES = 1 << 15
"""The header of an index that kway wrote fits in this many bytes."""
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, struct.error)

INDEX_SUFFIX = ".index.safetensors"

# The tensors in the order in which safetensors writes them: (safetensors dtype, numpy dtype, shape
# [..., N]). places: block, size and crc32, first of the `.cls` member and then of the sample.
# extension: first of the sample and then of the `.cls` member. With this order, the range that
# training reads is contiguous and does not contain `.cls` data.
_TENSORS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "places": ("U32", "<u4", (2, 3)),
    "labels": ("I32", "<i4", ()),
    "extension": ("U8", "u1", (2,)),
}


@dataclass(frozen=True)
class ShardIndex:
    """The locations of N samples. Column 0 is the sample itself, and column 1 is its `.cls`
    member.

    blocks: the offset of the first byte in blocks of 512 bytes, uint32 [N, 2]. sizes: the sizes in
    bytes, uint32 [N, 2]. crc32: the checksums, uint32 [N, 2]. extension: the positions in
    `extensions`, uint8 [N, 2]. labels: the labels, int32 [N]. Each column is contiguous.
    duplicates: the number of samples that the writer dropped from this shard
    (`data/shards/duplicates.py`).
    """

    info: ShardInfo
    extensions: tuple[str, ...]
    blocks: np.ndarray
    sizes: np.ndarray
    crc32: np.ndarray
    extension: np.ndarray
    labels: np.ndarray
    duplicates: int = 0


class Entry(NamedTuple):
    """A member's location in the tar (in blocks of 512 bytes), its size in bytes and its crc32."""

    extension: str
    block: int
    size: int
    crc32: int


class IndexBuilder:
    """Collects the entries of one shard while it is written. This requires 30 bytes of memory per
    sample.
    """

    def __init__(self) -> None:
        self._extensions: list[str] = []
        self._places, self._labels, self._extension = array("I"), array("i"), array("B")

    def add(self, members: dict[str, bytes], *, offset: int, sample: str, label: int) -> int:
        """Add `members` (extension -> bytes), which are written in sorted order, starting at
        `offset` in the tar.

        Returns the offset after the members.
        """
        entries = {}
        for extension in sorted(members):
            data = members[extension]
            crc32 = isal_zlib.crc32(data)
            entries[extension] = Entry(extension, offset // BLOCK + 1, len(data), crc32)
            offset += BLOCK + -(-len(data) // BLOCK) * BLOCK
        self.add_entries(entries[sample], entries[LABEL_EXTENSION], label=label)
        return offset

    def add_entries(self, sample: Entry, label_member: Entry, *, label: int) -> None:
        """Add a sample whose two members can be anywhere in the tar."""
        for entry in (sample, label_member):
            if entry.extension not in self._extensions:
                self._extensions.append(entry.extension)
            self._extension.append(self._extensions.index(entry.extension))
        for entry in (label_member, sample):
            self._places.extend((entry.block, entry.size, entry.crc32))
        self._labels.append(label)

    def __len__(self) -> int:
        return len(self._labels)

    def crc32(self) -> int:
        """Return the checksum of all entries, for the manifest."""
        return _crc32(self._extensions, self._tensors())

    def to_bytes(self, info: ShardInfo, *, duplicates: int = 0) -> bytes:
        """Return the content of the index file.

        `info` is included, so that a resumed run does not have to hash the shard again.
        """
        about: dict[str, Any] = {
            "format": FORMAT,
            "shard": info.model_dump(),
            "extensions": self._extensions,
        }
        if duplicates:
            about["duplicates"] = duplicates
        # Use a single metadata key, because safetensors writes several keys in random order.
        return save(self._tensors(), metadata={"kway": json.dumps(about)})

    def _tensors(self) -> dict[str, np.ndarray]:
        places = np.array(self._places, np.uint32).reshape(-1, 2, 3).transpose(1, 2, 0)
        extension = np.array(self._extension, np.uint8).reshape(-1, 2).transpose()
        tensors = {"places": places, "labels": np.array(self._labels), "extension": extension}
        # safetensors ignores strides, so a transposed view must be copied first.
        return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _crc32(extensions: Sequence[str], tensors: Mapping[str, np.ndarray]) -> int:
    crc = isal_zlib.crc32(json.dumps(list(extensions)).encode())
    for name in _TENSORS:
        crc = isal_zlib.crc32(tensors[name].data, crc)
    return crc


def index_path(shard: Path) -> Path:
    """Map `train-000000.tar` to `train-000000.index.safetensors`, in the same folder."""
    return shard.with_name(shard.name.removesuffix(".tar") + INDEX_SUFFIX)


def max_index_bytes(shard: ShardInfo) -> int:
    """Return an upper limit of the size of the index of a shard."""
    header, each = _MAX_BYTES
    return header + each * shard.samples


def open_index(shard: Path) -> ShardIndex:
    """Map the index of `shard`.

    Raises FileNotFoundError if the index is missing, and ValueError if it is damaged or has the
    wrong format.
    """
    path = index_path(shard)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: copy it, or {SHARD_AGAIN}")
    try:
        return map_index(path)
    except OtherFormatError as error:
        raise ValueError(f"{path} {error}: {SHARD_AGAIN}") from error
    except ValueError as error:
        raise ValueError(f"{path} {error}: copy it, or {SHARD_AGAIN}") from error


class OtherFormatError(ValueError):
    """The index was written by a different version of kway, or the file is not an index."""


def map_index(path: Path) -> ShardIndex:
    """Map the index at `path`. Raises ValueError with only the reason if it is not valid."""
    try:
        return _open(path)
    except OtherFormatError:
        raise
    except (*_DAMAGE, RecursionError) as error:  # RecursionError: deeply nested brackets
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"is damaged ({reason})") from error


class IndexHeader(NamedTuple):
    """The metadata of an index. num_bytes: the size of the whole index file."""

    info: ShardInfo
    duplicates: int
    num_bytes: int


def read_header(start: bytes) -> IndexHeader:
    """Parse the first `HEADER_BYTES` of an index. Raises ValueError if they are not valid."""
    try:
        about, where = _layout(np.frombuffer(start, np.uint8))
        info = ShardInfo.model_validate(about["shard"])
        end = max(part.stop for part in where.values())
        return IndexHeader(info, _num_duplicates(about), end)
    except (*_DAMAGE, RecursionError) as error:
        raise ValueError(f"is damaged ({error})") from error


def _num_duplicates(about: Mapping[str, Any]) -> int:
    duplicates = about.get("duplicates", 0)
    if type(duplicates) is not int or duplicates < 0:
        raise ValueError(f"duplicates is {duplicates!r}"[:100])
    return duplicates


def _open(path: Path) -> ShardIndex:
    with path.open("rb") as file:
        # Read and check the file first and then map it, so that only the pages that are used later
        # stay in memory.
        content = np.frombuffer(file.read(), np.uint8)
        about, where = _layout(content)
        info = ShardInfo.model_validate(about["shard"])
        extensions = tuple(str(extension) for extension in about["extensions"])
        duplicates = _num_duplicates(about)
        _check(extensions, _tensors(content, where, info.samples), info)
        tensors = _tensors(mapped(file), where, info.samples)
    disable_readahead(tensors["places"][1], tensors["extension"][0])
    blocks, sizes, crc32 = tensors["places"][::-1].transpose(1, 2, 0)
    return ShardIndex(
        info,
        extensions,
        blocks,
        sizes,
        crc32,
        extension=tensors["extension"].transpose(),
        labels=tensors["labels"],
        duplicates=duplicates,
    )


def _layout(content: np.ndarray) -> tuple[dict[str, Any], dict[str, slice]]:
    """Parse the bytes of a safetensors file, uint8 [n], into metadata and tensor ranges.

    This parser follows the published layout. The safetensors numpy reader is not used, because it
    copies every tensor.
    """
    (length,) = struct.unpack("<Q", content[:8].tobytes())
    if length > min(_MAX_HEADER, len(content) - 8):
        raise ValueError(f"its header claims {length} bytes")
    header = json.loads(content[8 : 8 + length].tobytes())
    about = json.loads(header["__metadata__"]["kway"])
    if (found := about.get("format")) != FORMAT:
        raise OtherFormatError(f"has format {found}, but this version of kway reads {FORMAT}")
    where = {}
    for name, (dtype, _, shape) in _TENSORS.items():
        entry, wanted = header[name], [*shape, about["shard"]["samples"]]
        start, stop = entry["data_offsets"]
        if entry["dtype"] != dtype or entry["shape"] != wanted or start < 0:
            raise ValueError(f"{name} is {entry['dtype']} {entry['shape']} at {start}")
        where[name] = slice(8 + length + start, 8 + length + stop)
    return about, where


def _tensors(
    content: np.ndarray, where: Mapping[str, slice], samples: int
) -> dict[str, np.ndarray]:
    """Return views of the tensors. Raises ValueError if a tensor has too few bytes for its
    shape.
    """
    return {
        name: content[where[name]].view(kind).reshape(*shape, samples)
        for name, (_, kind, shape) in _TENSORS.items()
    }


def _check(extensions: Sequence[str], tensors: Mapping[str, np.ndarray], info: ShardInfo) -> None:
    if _crc32(extensions, tensors) != info.index_crc32:
        raise ValueError("its checksum does not match")
    if tensors["extension"].max() >= len(extensions) or tensors["places"][:, 0].min() < 1:
        raise ValueError("an entry is out of range")


def read_member(descriptor: int, index: ShardIndex, row: int, column: int = 0) -> bytes | None:
    """Return the bytes of one member, or None if its checksum does not match."""
    size = int(index.sizes[row, column])
    data = os.pread(descriptor, size, int(index.blocks[row, column]) * BLOCK)
    return data if isal_zlib.crc32(data) == int(index.crc32[row, column]) else None


def read_key(descriptor: int, index: ShardIndex, row: int) -> str:
    """Return the sample's webdataset key from its tar header.

    Raises ValueError for a damaged header.
    """
    try:
        name = member_name(descriptor, int(index.blocks[row, 0]))
    except ValueError as error:
        raise ValueError(f"the tar header of sample {row} is damaged ({error})") from error
    return name.removesuffix("." + index.extensions[int(index.extension[row, 0])])


def check_labels(labels: Sequence[int] | np.ndarray, num_classes: int, shard: str) -> None:
    """Raise ValueError if a label is not a class index."""
    array = np.asarray(labels)
    bad = np.flatnonzero((array < 0) | (array >= num_classes))
    if len(bad):
        raise ValueError(
            f"{shard}: sample {bad[0]} has label {array[bad[0]]}, but the manifest has "
            f"{num_classes} classes: run kway shard again with an empty folder"
        )
