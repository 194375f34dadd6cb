"""Writes one rank's pieces as a safetensors file of DCP's layout, hashed on the way and on the disk
when the call returns.

Not by `HuggingFaceStorageWriter`: that makes the file in memory first, a second copy of all, and
what it wrote would have to be read again for its SHA-256. Its reader is what reads these files.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trainer.checkpoints.manifest import FileDigest
from trainer.checkpoints.pieces import Piece, bytes_of, stored_name

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


def write_file(path: Path, blocks: Iterable[memoryview]) -> FileDigest:
    """Write a file from its start, sync it to the disk and return its digest.

    Raises OSError if the disk does not take all of it. After an error the whole file has to be
    written again, because a second fsync succeeds even if the first one lost pages.
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
        raise OSError(f"{path.name} has {size} bytes after {written} were written")
    return FileDigest(bytes=written, sha256=digest.hexdigest())
