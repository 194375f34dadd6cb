"""Writes one rank's pieces as a safetensors file in DCP's layout.

The file is hashed while it is written and is synced to disk when the call returns.

DCP's `HuggingFaceStorageWriter` is not used because it builds the entire file in memory, as a
second copy of all tensors, and because computing the SHA-256 would require reading the file again.
DCP's `HuggingFaceStorageReader` reads these files.
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
    """Write this rank's pieces and return the digest of the file. Raises OSError if writing
    fails.
    """
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
            "dtype": stored_name(piece.name, piece.tensor.dtype),
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
