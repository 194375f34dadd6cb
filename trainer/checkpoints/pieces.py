"""The pieces of tensors on each rank, their assignment to the ranks that write them, and the file
that a rank writes: a safetensors file in DCP's layout.

DCP's `HuggingFaceStorageReader` reads these files. Its `HuggingFaceStorageWriter` is not used
because it builds the entire file in memory, as a second copy of all tensors, and because computing
the SHA-256 would require reading the file again.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultSavePlanner

from trainer.checkpoints.exchange import exchange
from trainer.checkpoints.manifest import FileDigest

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BLOCK_BYTES = 8 * 2**20
Description = list[str]  # key, name, elements of the tensor, elements of the piece, bytes


@dataclass(frozen=True)
class Piece:
    """A box of the tensor `name`, which has the given `shape`. The box starts at `offsets`, and
    `tensor` contains its values.
    """

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: Tensor

    @property
    def key(self) -> str:
        return f"{self.name}@{','.join(map(str, self.offsets))}"

    def description(self) -> Description:
        sizes = (math.prod(self.shape), self.tensor.numel(), self.tensor.nbytes)
        return [self.key, self.name, *map(str, sizes)]


class Ownership:
    """Assigns pieces to ranks and caches the result. Ranks exchange the descriptions of their
    pieces again only if the descriptions change.
    """

    def __init__(self, group: ProcessGroup | None, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._known = ""
        self._mine: set[str] = set()

    def choose(self, entries: dict[str, Tensor]) -> list[Piece]:
        """Return the pieces of `entries` that this rank writes (collective)."""
        held = pieces_of(entries)
        described = [piece.description() for piece in held]
        fingerprint = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        if not all(exchange(fingerprint == self._known, self._group)):
            self._mine = assign_owners(exchange(described, self._group))[self._rank]
            self._known = fingerprint
        return [piece for piece in held if piece.key in self._mine]


def pieces_of(entries: dict[str, Tensor]) -> list[Piece]:
    """Return this rank's pieces of the entries. Empty shards are skipped.

    Raises ValueError with the tensor's name for a dtype that checkpoints do not support.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(entries)
    pieces = []
    for item in planner.create_local_plan().items:
        assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
        # Check dtypes here, where all ranks see the same dtypes and all raise the error. If only
        # some ranks raised an error in the writer thread, the other ranks would wait for them.
        if (dtype := item.tensor_data.properties.dtype) not in _DTYPES:
            raise ValueError(
                f"tensor {item.index.fqn} has dtype {dtype}, which checkpoints do not support: use "
                f"one of {', '.join(str(known).removeprefix('torch.') for known in _DTYPES)}"
            )
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        shape = tuple(item.tensor_data.size)
        if tensor.numel() or not math.prod(shape):
            offsets = tuple(item.tensor_data.chunk.offsets)
            pieces.append(Piece(item.index.fqn, offsets, shape, tensor.detach()))
    return pieces


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Return a contiguous CPU tensor as an array of bytes, without copying. Bytes are used because
    numpy does not support bfloat16.
    """
    return tensor.reshape(-1).view(torch.uint8).numpy()


def assign_owners(held: Sequence[Sequence[Description]]) -> list[set[str]]:
    """Return the keys that each rank writes, given the pieces on each rank. Every key is written
    once, and each rank writes about the same number of bytes.
    """
    sizes = {key: int(num_bytes) for rank in held for key, *_, num_bytes in rank}
    holders: dict[str, list[int]] = {}
    for rank, descriptions in enumerate(held):
        for key, *_ in descriptions:
            holders.setdefault(key, []).append(rank)
    _check_complete(held)
    owned: list[set[str]] = [set() for _ in held]
    load = [0] * len(held)
    # First assign the pieces that are on a single rank, because there is no alternative. Then
    # assign the others, largest first, to the rank with the least load so far.
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
        owner = min(holders[key], key=lambda rank: (load[rank], rank))
        owned[owner].add(key)
        load[owner] += sizes[key]
    return owned


def _check_complete(held: Sequence[Sequence[Description]]) -> None:
    """Check that the pieces cover every tensor, so that a bug in a strategy cannot create a
    checkpoint with missing elements.
    """
    expected: dict[str, int] = {}
    found: dict[str, int] = {}
    for _, name, elements, here, _ in {row[0]: row for rank in held for row in rank}.values():
        expected[name] = int(elements)
        found[name] = found.get(name, 0) + int(here)
    for name, count in expected.items():
        assert found[name] == count, f"the ranks have {found[name]} of {count} elements of {name}"


# ---------------------------------------------------------------- the file of a rank


def write_shard(path: Path, pieces: Sequence[Piece]) -> FileDigest:
    """Write this rank's pieces and return the digest of the file. Raises OSError if writing
    fails."""
    # Put the widest elements first, because the reader creates views of the file, which require
    # aligned offsets.
    wide_first = sorted(pieces, key=lambda piece: (-piece.tensor.element_size(), piece.key))
    return write_file(path, _blocks(wide_first))


def _blocks(pieces: Sequence[Piece]) -> Iterator[memoryview]:
    header = _header(pieces)
    yield memoryview(struct.pack("<Q", len(header)) + header)
    for piece in pieces:
        # This copies one piece at a time from the device to the host.
        content = bytes_of(piece.tensor.cpu().contiguous()).data
        for begin in range(0, len(content), _BLOCK_BYTES):
            yield content[begin : begin + _BLOCK_BYTES]


def _header(pieces: Sequence[Piece]) -> bytes:
    offsets = {piece.name: {"saved_offsets": piece.offsets} for piece in pieces}
    assert len(offsets) == len(pieces), "a rank writes at most one box of a tensor"
    # DCP's reader gets the offsets of each piece in its tensor from here.
    header: dict[str, object] = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(offsets)}}
    begin = 0
    for piece in pieces:
        end = begin + piece.tensor.nbytes
        header[piece.name] = {
            "dtype": _DTYPES[piece.tensor.dtype],
            "shape": list(piece.tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def write_file(path: Path, blocks: Iterable[memoryview]) -> FileDigest:
    """Write a new file, sync it to disk and return its digest.

    Raises OSError if not everything could be written. After an error, write the whole file again: a
    second fsync can succeed even if the first one lost pages.
    """
    digest, written = hashlib.sha256(), 0
    with path.open("wb") as file:
        for block in blocks:
            file.write(block)
            digest.update(block)
            written += len(block)
        file.flush()
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    if size != written:
        raise OSError(f"{path.name} has {size} bytes, but {written} were written")
    return FileDigest(bytes=written, sha256=digest.hexdigest())
