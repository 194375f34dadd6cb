"""Writes a file so that it is on the disk, whole, when the call returns; hashed on the way."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from trainer.checkpoints.manifest import FileDigest


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
