"""The offset index beside a shard: where each sample's bytes lie, for a loader to `pread`.

30 bytes a sample, mapped into memory. The key is not repeated here: it stands in the tar header
just before the bytes. The index is no archive; the shard alone is enough for any webdataset reader.
"""

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save

from data.manifest import ShardInfo
from data.tar_headers import BLOCK, member_name

LABEL_EXTENSION = "cls"
_COLUMNS = {"blocks": "U32", "sizes": "U32", "crc32": "U32", "extension": "U8", "labels": "I32"}
_MAX_HEADER = 1 << 20


@dataclass(frozen=True)
class ShardIndex:
    """Members of N samples. Column 0 is the sample itself, column 1 its `.cls` file.

    blocks: first byte over 512, uint32 [N, 2]; sizes: bytes, uint32 [N, 2]; crc32: uint32 [N, 2];
    extension: position in `extensions`, uint8 [N, 2]; labels: int32 [N]. duplicates: samples that
    the writer dropped from this shard (`data/duplicates.py`).
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
    """Collects the entries of one shard while it is written."""

    def __init__(self) -> None:
        self._extensions: list[str] = []
        self._rows: list[tuple[int, ...]] = []

    def add(self, members: dict[str, bytes], *, offset: int, sample: str, label: int) -> int:
        """Note `members` (extension -> bytes), written in sorted order from tar `offset` on.

        Returns the offset after them.
        """
        entries = {}
        for extension in sorted(members):
            data = members[extension]
            entries[extension] = Entry(extension, offset // BLOCK + 1, len(data), zlib.crc32(data))
            offset += BLOCK + -(-len(data) // BLOCK) * BLOCK
        self.add_entries(entries[sample], entries[LABEL_EXTENSION], label=label)
        return offset

    def add_entries(self, sample: Entry, label_member: Entry, *, label: int) -> None:
        """Note a sample whose two members stand anywhere in the tar."""
        row: list[int] = []
        for entry in (sample, label_member):
            if entry.extension not in self._extensions:
                self._extensions.append(entry.extension)
            row += (entry.block, entry.size, entry.crc32)
            row.append(self._extensions.index(entry.extension))
        self._rows.append((*row, label))

    def __len__(self) -> int:
        return len(self._rows)

    def crc32(self) -> int:
        """Of all entries; it stands in the manifest."""
        return _crc32(self._extensions, self._arrays())

    def to_bytes(self, info: ShardInfo, *, duplicates: int = 0) -> bytes:
        """The file's content; `info` travels along, so that a resumed run need not hash again."""
        # One metadata key: safetensors writes several in a random order.
        about: dict[str, Any] = {"shard": info.model_dump(), "extensions": self._extensions}
        if duplicates:
            about["duplicates"] = duplicates
        return save(self._arrays(), metadata={"kway": json.dumps(about)})

    def _arrays(self) -> dict[str, np.ndarray]:
        table = np.array(self._rows, dtype=np.int64)
        arrays = {
            "blocks": table[:, [0, 4]].astype(np.uint32),
            "sizes": table[:, [1, 5]].astype(np.uint32),
            "crc32": table[:, [2, 6]].astype(np.uint32),
            "extension": table[:, [3, 7]].astype(np.uint8),
            "labels": table[:, 8].astype(np.int32),
        }
        # safetensors writes a transposed view as if it were not one.
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _crc32(extensions: Sequence[str], arrays: Mapping[str, np.ndarray]) -> int:
    crc = zlib.crc32(json.dumps(list(extensions)).encode())
    for name in _COLUMNS:
        crc = zlib.crc32(arrays[name].view(np.uint8).data, crc)
    return crc


def index_path(shard: Path) -> Path:
    """`train-000000.tar` -> `train-000000.index.safetensors`, in the same folder."""
    return shard.with_name(shard.name.removesuffix(".tar") + ".index.safetensors")


def open_index(shard: Path) -> ShardIndex:
    """Map the index of `shard`; ValueError where it is damaged."""
    path = index_path(shard)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: copy it or run kway shard again")
    try:
        return _map(path)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise ValueError(
            f"{path} is damaged ({str(error).splitlines()[0]}): copy it or run kway shard again"
        ) from error


def _map(path: Path) -> ShardIndex:
    """Map a safetensors file by its published layout; its own numpy reader copies every tensor."""
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(_MAX_HEADER, size - 8):
            raise ValueError(f"its header claims {length} bytes")
        header = json.loads(file.read(length))
    about = json.loads(header["__metadata__"]["kway"])
    info = ShardInfo.model_validate(about["shard"])
    extensions = tuple(str(extension) for extension in about["extensions"])
    arrays = {}
    for name, dtype in _COLUMNS.items():
        entry = header[name]
        shape = (info.samples,) if name == "labels" else (info.samples, 2)
        if entry["dtype"] != dtype or tuple(entry["shape"]) != shape:
            raise ValueError(f"{name} is {entry['dtype']} {entry['shape']}")
        start, stop = entry["data_offsets"]
        kind = {"U32": "<u4", "U8": "u1", "I32": "<i4"}[dtype]
        if stop - start != np.dtype(kind).itemsize * int(np.prod(shape)) or start < 0:
            raise ValueError(f"{name} has the wrong length")
        arrays[name] = np.memmap(path, kind, "r", offset=8 + length + start, shape=shape)
    if _crc32(extensions, arrays) != info.index_crc32:
        raise ValueError("its checksum does not hold")
    if arrays["extension"].max() >= len(extensions) or arrays["blocks"].min() < 1:
        raise ValueError("an entry points nowhere")
    return ShardIndex(info, extensions, **arrays, duplicates=int(about.get("duplicates", 0)))


def read_member(descriptor: int, index: ShardIndex, row: int, column: int = 0) -> bytes | None:
    """Bytes of one member, or None where they are not those that were written."""
    size = int(index.sizes[row, column])
    data = os.pread(descriptor, size, int(index.blocks[row, column]) * BLOCK)
    return data if zlib.crc32(data) == int(index.crc32[row, column]) else None


def read_key(descriptor: int, index: ShardIndex, row: int) -> str:
    """The sample's webdataset key, from its tar header; ValueError where the header is damaged."""
    try:
        name = member_name(descriptor, int(index.blocks[row, 0]))
    except ValueError as error:
        raise ValueError(f"the tar header of sample {row} is damaged ({error})") from error
    return name.removesuffix("." + index.extensions[int(index.extension[row, 0])])


def check_labels(labels: Sequence[int] | np.ndarray, num_classes: int, shard: Path) -> None:
    """Raise ValueError where a label has no class."""
    array = np.asarray(labels)
    bad = np.flatnonzero((array < 0) | (array >= num_classes))
    if len(bad):
        raise ValueError(
            f"{shard}: sample {bad[0]} has label {array[bad[0]]} and the manifest lists "
            f"{num_classes} classes: run kway shard again into an empty folder"
        )
