"""The offset index beside a shard: where each sample's bytes lie, for a loader to `pread`.

30 bytes a sample; the 17 that training touches stand in one piece. The file is mapped, so that all
processes of a machine share it. The key is not repeated here: it stands in the tar header just
before the bytes. The index is no archive; the shard alone is enough for any webdataset reader.
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

from data.shards.manifest import ShardInfo
from data.shards.mapped import keep_apart, mapped
from data.tars.headers import BLOCK, member_name

FORMAT = 1
LABEL_EXTENSION = "cls"
_MAX_HEADER = 1 << 20
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, struct.error)
_AGAIN = "make it again with kway shard, or kway shard index for the shards of others"

# Tensors in the order in which safetensors writes them: (its type, numpy's, shape [..., N]).
# places: block, size and crc32 of the `.cls` member, then of the sample; extension: of the sample,
# then of the `.cls`. So nothing of the `.cls` stands between what training touches.
_TENSORS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "places": ("U32", "<u4", (2, 3)),
    "labels": ("I32", "<i4", ()),
    "extension": ("U8", "u1", (2,)),
}


@dataclass(frozen=True)
class ShardIndex:
    """Members of N samples. Column 0 is the sample itself, column 1 its `.cls` file.

    blocks: first byte over 512, uint32 [N, 2]; sizes: bytes, uint32 [N, 2]; crc32: uint32 [N, 2];
    extension: position in `extensions`, uint8 [N, 2]; labels: int32 [N]. Each column is contiguous.
    duplicates: samples that the writer dropped from this shard (`data/shards/duplicates.py`).
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
    """Where a member's bytes stand (in blocks of 512 from the start), how many, and their crc32."""

    extension: str
    block: int
    size: int
    crc32: int


class IndexBuilder:
    """Collects the entries of one shard while it is written; 30 bytes of memory a sample."""

    def __init__(self) -> None:
        self._extensions: list[str] = []
        self._places, self._labels, self._extension = array("I"), array("i"), array("B")

    def add(self, members: dict[str, bytes], *, offset: int, sample: str, label: int) -> int:
        """Note `members` (extension -> bytes), written in sorted order from tar `offset` on.

        Returns the offset after them.
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
        """Note a sample whose two members stand anywhere in the tar."""
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
        """Of all entries; it stands in the manifest."""
        return _crc32(self._extensions, self._tensors())

    def to_bytes(self, info: ShardInfo, *, duplicates: int = 0) -> bytes:
        """The file's content; `info` travels along, so that a resumed run need not hash again."""
        about: dict[str, Any] = {
            "format": FORMAT,
            "shard": info.model_dump(),
            "extensions": self._extensions,
        }
        if duplicates:
            about["duplicates"] = duplicates
        # One metadata key: safetensors writes several in a random order.
        return save(self._tensors(), metadata={"kway": json.dumps(about)})

    def _tensors(self) -> dict[str, np.ndarray]:
        places = np.array(self._places, np.uint32).reshape(-1, 2, 3).transpose(1, 2, 0)
        extension = np.array(self._extension, np.uint8).reshape(-1, 2).transpose()
        tensors = {"places": places, "labels": np.array(self._labels), "extension": extension}
        # safetensors writes a transposed view as if it were not one.
        return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _crc32(extensions: Sequence[str], tensors: Mapping[str, np.ndarray]) -> int:
    crc = isal_zlib.crc32(json.dumps(list(extensions)).encode())
    for name in _TENSORS:
        crc = isal_zlib.crc32(tensors[name].data, crc)
    return crc


def index_path(shard: Path) -> Path:
    """`train-000000.tar` -> `train-000000.index.safetensors`, in the same folder."""
    return shard.with_name(shard.name.removesuffix(".tar") + ".index.safetensors")


def open_index(shard: Path) -> ShardIndex:
    """Map the index of `shard`; ValueError where it is damaged or of another format."""
    path = index_path(shard)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: copy it, or {_AGAIN}")
    try:
        return map_index(path)
    except OtherFormatError as error:
        raise ValueError(f"{path} {error}: {_AGAIN}") from error
    except ValueError as error:
        raise ValueError(f"{path} {error}: copy it, or {_AGAIN}") from error


class OtherFormatError(ValueError):
    """Of another version of kway, or of something else."""


def map_index(path: Path) -> ShardIndex:
    """`open_index` at the path of an index; the ValueError is what is wrong with it, alone."""
    try:
        return _open(path)
    except OtherFormatError:
        raise
    except (*_DAMAGE, RecursionError) as error:  # the last: brackets in brackets
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"is damaged ({reason})") from error


def _open(path: Path) -> ShardIndex:
    with path.open("rb") as file:
        # Read and checked, then mapped: only what is used later stays in memory.
        content = np.frombuffer(file.read(), np.uint8)
        about, where = _layout(content)
        info = ShardInfo.model_validate(about["shard"])
        extensions = tuple(str(extension) for extension in about["extensions"])
        duplicates = about.get("duplicates", 0)
        if type(duplicates) is not int or duplicates < 0:
            raise ValueError(f"duplicates is {duplicates!r}"[:100])
        _check(extensions, _tensors(content, where, info.samples), info)
        tensors = _tensors(mapped(file), where, info.samples)
    keep_apart(tensors["places"][1], tensors["extension"][0])
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
    """What a safetensors file (its bytes, uint8 [n]) says about itself, and where tensors stand.

    By the published layout: its own numpy reader copies every tensor.
    """
    (length,) = struct.unpack("<Q", content[:8].tobytes())
    if length > min(_MAX_HEADER, len(content) - 8):
        raise ValueError(f"its header claims {length} bytes")
    header = json.loads(content[8 : 8 + length].tobytes())
    about = json.loads(header["__metadata__"]["kway"])
    if (found := about.get("format")) != FORMAT:
        raise OtherFormatError(f"has format {found} and this kway reads {FORMAT}")
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
    """Views; ValueError where a tensor has not as many bytes as its shape needs."""
    return {
        name: content[where[name]].view(kind).reshape(*shape, samples)
        for name, (_, kind, shape) in _TENSORS.items()
    }


def _check(extensions: Sequence[str], tensors: Mapping[str, np.ndarray], info: ShardInfo) -> None:
    if _crc32(extensions, tensors) != info.index_crc32:
        raise ValueError("its checksum does not hold")
    if tensors["extension"].max() >= len(extensions) or tensors["places"][:, 0].min() < 1:
        raise ValueError("an entry points nowhere")


def read_member(descriptor: int, index: ShardIndex, row: int, column: int = 0) -> bytes | None:
    """Bytes of one member, or None where they are not those that were written."""
    size = int(index.sizes[row, column])
    data = os.pread(descriptor, size, int(index.blocks[row, column]) * BLOCK)
    return data if isal_zlib.crc32(data) == int(index.crc32[row, column]) else None


def read_key(descriptor: int, index: ShardIndex, row: int) -> str:
    """The sample's webdataset key, from its tar header; ValueError where the header is damaged."""
    try:
        name = member_name(descriptor, int(index.blocks[row, 0]))
    except ValueError as error:
        raise ValueError(f"the tar header of sample {row} is damaged ({error})") from error
    return name.removesuffix("." + index.extensions[int(index.extension[row, 0])])


def check_labels(labels: Sequence[int] | np.ndarray, num_classes: int, shard: str) -> None:
    """Raise ValueError where a label has no class."""
    array = np.asarray(labels)
    bad = np.flatnonzero((array < 0) | (array >= num_classes))
    if len(bad):
        raise ValueError(
            f"{shard}: sample {bad[0]} has label {array[bad[0]]} and the manifest lists "
            f"{num_classes} classes: run kway shard again into an empty folder"
        )
