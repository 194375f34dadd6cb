"""The index of a split: one flat file with the location and label of every sample, in shard order.

It is built from the indices of the shards and mapped into memory, so all processes of a machine
share it, and a lookup does not depend on the number of shards.
"""

import json
import mmap
from collections.abc import Iterable
from io import BytesIO
from itertools import pairwise
from typing import IO, NamedTuple

import numpy as np
from isal import isal_zlib

from data.shards.index import ShardIndex

# The columns of the file, one after another, and their bytes per sample.
_COLUMNS = {"places": 12, "labels": 4, "extension": 1}
_ABOUT_BYTES = 1 << 16  # of JSON after the columns
_CHUNK = 1 << 22


class SplitIndex(NamedTuple):
    """The locations of the N samples of a split.

    places: the first block of 512 bytes in the shard, the size in bytes and the crc32 of each
    sample, uint32 [N, 3]. labels: int32 [N]. extension: the position in `extensions`, uint8 [N].
    """

    places: np.ndarray
    labels: np.ndarray
    extension: np.ndarray
    extensions: tuple[str, ...]


def index_bytes(num_samples: int) -> int:
    """Return the size of the file."""
    return sum(_COLUMNS.values()) * num_samples + _ABOUT_BYTES


def write_split_index(file: IO[bytes], shards: Iterable[ShardIndex], num_samples: int) -> None:
    """Write the index of the split that consists of `shards`, with `num_samples` in total."""
    starts = dict(zip(_COLUMNS, _column_starts(num_samples), strict=False))
    crc32 = dict.fromkeys(_COLUMNS, 0)
    extensions: dict[str, int] = {}
    first = 0
    for shard in shards:
        numbers = [extensions.setdefault(name, len(extensions)) for name in shard.extensions]
        places = np.stack([shard.blocks[:, 0], shard.sizes[:, 0], shard.crc32[:, 0]], axis=1)
        extension = np.array(numbers, np.uint8)[shard.extension[:, 0]]
        columns = {"places": places, "labels": shard.labels, "extension": extension}
        for name, column in columns.items():
            content = np.ascontiguousarray(column).data
            crc32[name] = isal_zlib.crc32(content, crc32[name])
            file.seek(starts[name] + _COLUMNS[name] * first)
            file.write(content)
        first += shard.info.samples
    about = json.dumps({"extensions": list(extensions), "crc32": crc32}).encode()
    about = json.dumps([isal_zlib.crc32(about), about.decode()]).encode()
    file.seek(index_bytes(num_samples) - _ABOUT_BYTES)
    file.write(about.ljust(_ABOUT_BYTES))


def read_split_index(file: IO[bytes], num_samples: int) -> SplitIndex | None:
    """Map an index, or return None if its checksums do not match."""
    starts = _column_starts(num_samples)
    file.seek(starts[-1])
    try:
        crc32, stored = json.loads(file.read())
        about = json.loads(stored) if crc32 == isal_zlib.crc32(stored.encode()) else None
    except (ValueError, TypeError, AttributeError):
        return None
    if about is None:
        return None
    # Read the file for the checksums instead of mapping it, so that only the pages that are used
    # later are in the memory of this process.
    for name, (start, end) in zip(_COLUMNS, pairwise(starts), strict=True):
        crc32 = 0
        file.seek(start)
        for position in range(start, end, _CHUNK):
            crc32 = isal_zlib.crc32(file.read(min(_CHUNK, end - position)), crc32)
        if crc32 != about["crc32"][name]:
            return None
    if isinstance(file, BytesIO):
        content = np.frombuffer(file.getbuffer(), np.uint8)
    else:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        memory.madvise(mmap.MADV_RANDOM)  # otherwise, a lookup also reads the pages around it
        content = np.frombuffer(memory, np.uint8)
    places, labels, extension = (content[start:end] for start, end in pairwise(starts))
    return SplitIndex(
        places.view("<u4").reshape(num_samples, 3),
        labels.view("<i4"),
        extension,
        tuple(about["extensions"]),
    )


def _column_starts(num_samples: int) -> list[int]:
    """Return the offset of each column and the end of the last one."""
    return [0, *np.cumsum([size * num_samples for size in _COLUMNS.values()]).tolist()]
