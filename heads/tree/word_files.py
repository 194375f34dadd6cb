"""Read files of word vectors: word2vec binary and text, fastText .vec, GloVe .txt, each optionally
gzipped.

A file is read once, as a stream, and only the vectors that the caller needs are parsed.
"""

import gzip
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

FloatVectors = NDArray[np.float32]
Entry = tuple[str, FloatVectors]

WORD_FILE_SUFFIXES = (".bin", ".vec", ".txt")
_LONGEST_WORD_BYTES = 4096


def is_word_file(path: Path) -> bool:
    """Return whether the suffix, apart from .gz, is that of a file of word vectors."""
    return _suffix(path) in WORD_FILE_SUFFIXES


def read_words(path: Path, is_needed: Callable[[str], bool]) -> Iterator[Entry]:
    """Yield (word, float32 vector [D]) in file order for every word that `is_needed` accepts.

    `.bin` is word2vec binary. Any other suffix is text with one word per line, with or without a
    header line `words dim`. Raises ValueError for a file that is truncated, has vectors of
    different lengths, or contains numbers that are not finite.
    """
    read = _binary_words if _suffix(path) == ".bin" else _text_words
    with cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for word, vector in read(path, file, is_needed):
                if not np.isfinite(vector).all():
                    raise ValueError(
                        f"{path}: the vector of {word!r} contains NaN or infinity: fix the file"
                    )
                yield word, vector
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{path} is not a complete gzip file ({error}): download it again"
            ) from None


def _suffix(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def _text_words(path: Path, file: IO[bytes], is_needed: Callable[[str], bool]) -> Iterator[Entry]:
    first = file.readline()
    header = _header(first)
    dim = header[1] if header else len(first.split()) - 1
    if dim < 1:
        raise ValueError(f"{path} contains no word vectors: write `word number number …` lines")
    if not header:
        file.seek(0)
    num = 0
    for num, line in enumerate(file, 1):
        word, *numbers = line.rstrip().rsplit(None, dim) or [b""]
        name = word.decode("utf-8", "replace")
        if len(numbers) != dim:
            raise ValueError(
                f"{path} is damaged (word {num} does not have {dim} numbers): download it again"
            )
        if is_needed(name):
            try:
                yield name, np.array([float(number) for number in numbers], np.float32)
            except ValueError:
                raise ValueError(
                    f"{path}: the vector of {name!r} contains text that is not a number: fix the "
                    "file"
                ) from None
    if header and num != header[0]:
        raise ValueError(f"{path} is truncated ({num} of {header[0]} words): download it again")


def _binary_words(path: Path, file: IO[bytes], is_needed: Callable[[str], bool]) -> Iterator[Entry]:
    header = _header(file.readline(100))
    if header is None:
        raise ValueError(
            f"{path} is not a word2vec binary file, because the header `words dim` is missing: "
            "if it is a fastText model, pass its .vec file; if it is a text file, rename it to .txt"
        )
    num, dim = header
    for i in range(num):
        # Some programs write a line end before each word.
        letters = islice(iter(lambda: file.read(1) or b" ", b" "), _LONGEST_WORD_BYTES)
        name = b"".join(letters).lstrip(b"\n").decode("utf-8", "replace")
        numbers = file.read(4 * dim)
        if len(numbers) < 4 * dim:
            raise ValueError(f"{path} is truncated ({i} of {num} words): download it again")
        if is_needed(name):
            yield name, np.frombuffer(numbers, "<f4").astype(np.float32)


def _header(line: bytes) -> tuple[int, int] | None:
    """Parse a header line `words dim`; return None for any other line."""
    parts = line.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return None
    num, dim = int(parts[0]), int(parts[1])
    return (num, dim) if num > 0 and dim > 0 else None
