"""Writes one rank's pieces as a safetensors file of DCP's layout, hashing as it writes.

Not by `HuggingFaceStorageWriter`: that makes the file in memory first, a second copy of all, and
what it wrote would have to be read again for its SHA-256. Its reader is what reads these files.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.checkpoints.dtypes import stored_name
from trainer.checkpoints.durable_file import write_file
from trainer.checkpoints.manifest import FileDigest
from trainer.checkpoints.pieces import Piece, bytes_of

_BLOCK_BYTES = 8 * 2**20


def write_shard(path: Path, pieces: Sequence[Piece]) -> FileDigest:
    """Write this rank's pieces; what the file must be from now on. Raises OSError."""
    # Wide elements first: the reader views them in place, which takes aligned offsets.
    wide_first = sorted(pieces, key=lambda piece: (-piece.tensor.element_size(), piece.key))
    return write_file(path, _blocks(wide_first))


def _blocks(pieces: Sequence[Piece]) -> Iterator[memoryview]:
    header = _header(pieces)
    yield memoryview(struct.pack("<Q", len(header)) + header)
    for piece in pieces:
        # One on a device is copied here, alone.
        content = bytes_of(piece.tensor.cpu().contiguous()).data
        for begin in range(0, len(content), _BLOCK_BYTES):
            yield content[begin : begin + _BLOCK_BYTES]


def _header(pieces: Sequence[Piece]) -> bytes:
    offsets = {piece.name: {"saved_offsets": piece.offsets} for piece in pieces}
    assert len(offsets) == len(pieces), "a rank writes one box of a tensor"
    # Where DCP's reader looks for the place of each box in its tensor.
    header: dict[str, object] = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(offsets)}}
    begin = 0
    for piece in pieces:
        end = begin + piece.tensor.nbytes
        header[piece.name] = {
            "dtype": stored_name(piece.name, piece.tensor.dtype),
            "shape": list(piece.tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
