"""Reads vectors of words from word2vec's binary format; anything else is for `kway tree`."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_LONGEST_WORD = 1000


def read_word2vec(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(word, float32 [D]) of each word. FileNotFoundError, or ValueError for another format."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file: give vectors in word2vec's binary format")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty: give vectors in word2vec's binary format")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(b"\n", 0, 100) + 1
        header = content[:start].split()
        if len(header) != 2 or not all(number.isdigit() for number in header):
            raise ValueError(
                f"{path} is not in word2vec's binary format: it has no first line `words dim`"
            )
        num, dim = map(int, header)
        for row in range(num):
            space = content.find(b" ", start, start + _LONGEST_WORD)
            end = space + 1 + 4 * dim
            if space < 0 or end > len(content):
                raise ValueError(f"{path} holds {row} words of {num}: the file is cut off")
            word = content[start:space].lstrip(b"\n").decode("utf-8", "replace")
            vector = np.frombuffer(content[space + 1 : end], "<f4").astype(np.float32)
            if not np.isfinite(vector).all():
                raise ValueError(f"{path}: the vector of {word!r} is not finite: give another file")
            yield word, vector
            start = end
