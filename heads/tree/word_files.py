"""Read files of word vectors: word2vec binary and text, fastText .vec, GloVe .txt, each optionally
gzipped.

A file is read once, as a stream, and only the vectors that the caller needs are parsed.
"""

import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

FloatVectors = NDArray[np.float32]
Entry = tuple[str, FloatVectors]

WORD_FILE_SUFFIXES = (".bin", ".vec", ".txt", ".w2v")
_LONGEST_WORD_BYTES = 4096
_FASTTEXT_MODEL = (793712314).to_bytes(4, "little")


def word_file_suffix(path: Path) -> str:
    """Return the file name suffix that determines the format, ignoring .gz."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def read_words(path: Path, is_needed: Callable[[str], bool]) -> Iterator[Entry]:
    """Yield (word, float32 vector [D]) in file order for every word that `is_needed` accepts.

    `.bin` is word2vec binary. Any other suffix is text with one word per line, with or without a
    header line `words dim`. Raises ValueError for a file that is truncated, has vectors of
    different lengths, or contains numbers that are not finite.
    """
    read = _binary_words if word_file_suffix(path) == ".bin" else _text_words
    for word, vector in read(path, is_needed):
        if not np.isfinite(vector).all():
            raise ValueError(
                f"{path}: the vector of {word!r} contains NaN or infinity: fix the file"
            )
        yield word, vector


def _text_words(path: Path, is_needed: Callable[[str], bool]) -> Iterator[Entry]:
    with _open(path) as file:
        first = file.readline()
        header = _header(first)
        dim = header[1] if header else len(first.split()) - 1
        if dim < 1:
            raise ValueError(f"{path} contains no word vectors: write `word number number …` lines")
        if not header:
            file.seek(0)
        num = 0
        for num, line in enumerate(file, 1):
            parts = line.rstrip().rsplit(None, dim)
            if len(parts) != dim + 1:
                raise ValueError(
                    f"{path} is damaged (word {num} does not have {dim} numbers): download it again"
                )
            word = parts[0].decode("utf-8", "replace")
            if is_needed(word):
                try:
                    numbers = [float(part) for part in parts[1:]]
                except ValueError:
                    raise ValueError(
                        f"{path}: the vector of {word!r} contains text that is not a number: fix "
                        "the file"
                    ) from None
                yield word, np.array(numbers, np.float32)
        if header and num != header[0]:
            raise ValueError(f"{path} is truncated ({num} of {header[0]} words): download it again")


def _binary_words(path: Path, is_needed: Callable[[str], bool]) -> Iterator[Entry]:
    with _open(path) as file:
        first = file.readline(100)
        if first[:4] == _FASTTEXT_MODEL:
            raise ValueError(f"{path} is a fastText model: pass its .vec file")
        header = _header(first)
        if header is None:
            raise ValueError(
                f"{path} is not a word2vec binary file, because the header `words dim` is missing: "
                "if it is a text file, rename it to .txt or .vec"
            )
        num, dim = header
        for i in range(num):
            # Some programs write a line end before each word.
            letters = islice(iter(lambda: file.read(1) or b" ", b" "), _LONGEST_WORD_BYTES)
            word = b"".join(letters).lstrip(b"\n")
            numbers = file.read(4 * dim)
            if len(numbers) < 4 * dim:
                raise ValueError(f"{path} is truncated ({i} of {num} words): download it again")
            name = word.decode("utf-8", "replace")
            if is_needed(name):
                yield name, np.frombuffer(numbers, "<f4").astype(np.float32)


def _header(line: bytes) -> tuple[int, int] | None:
    """Parse a header line `words dim`; return None for any other line."""
    parts = line.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return None
    num, dim = int(parts[0]), int(parts[1])
    return (num, dim) if num > 0 and dim > 0 else None


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) as unzipped:
        file: IO[bytes] = cast(IO[bytes], unzipped) if path.suffix == ".gz" else raw
        try:
            yield file
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{path} is not a complete gzip file ({error}): download it again"
            ) from None
