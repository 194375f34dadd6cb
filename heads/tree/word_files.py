"""Reads files of word vectors: word2vec binary and text, fastText .vec, GloVe .txt; gzipped too.

It streams a file once and parses only the words that the caller wants. No class names here.
"""

import gzip
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

FloatVectors = NDArray[np.float32]
Entry = tuple[str, FloatVectors]

WORD_FILE_SUFFIXES = (".bin", ".vec", ".txt", ".w2v")
_FASTTEXT_MODEL = (793712314).to_bytes(4, "little")
_LONGEST_WORD_BYTES = 4096


def word_file_suffix(path: Path) -> str:
    """The suffix of the file name that determines the format, without .gz."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def read_words(path: Path, wanted: Callable[[str], bool]) -> Iterator[Entry]:
    """The (word, vector float32 [D]) of a file, in its order, that `wanted` says yes to.

    `.bin` is word2vec binary, any other name is text: a line a word, with or without a first line
    `words dim`. Raises ValueError for a file that is cut off, has rows of another length, or holds
    what is no finite number.
    """
    read = _binary_words if word_file_suffix(path) == ".bin" else _text_words
    for word, vector in read(path, wanted):
        if not np.isfinite(vector).all():
            raise ValueError(f"{path}: the vector of {word!r} holds NaN or infinity: mend the file")
        yield word, vector


def _text_words(path: Path, wanted: Callable[[str], bool]) -> Iterator[Entry]:
    with _open(path) as file:
        first = file.readline()
        said = _header(first)
        dim = said[1] if said else len(first.split()) - 1
        if dim < 1:
            raise ValueError(f"{path} holds no word vectors: give lines `word number number …`")
        if not said:
            file.seek(0)
        num = 0
        for num, line in enumerate(file, 1):
            parts = line.rstrip().rsplit(None, dim)
            if len(parts) != dim + 1:
                raise ValueError(f"{path}: word {num} has not {dim} numbers: the file is damaged")
            word = parts[0].decode("utf-8", "replace")
            if wanted(word):
                yield word, _numbers(path, word, parts[1:])
        if said and num != said[0]:
            raise ValueError(f"{path} holds {num} words of {said[0]}: the file is cut off")


def _numbers(path: Path, word: str, parts: list[bytes]) -> FloatVectors:
    try:
        return np.array([float(part) for part in parts], np.float32)
    except ValueError:
        raise ValueError(f"{path}: the vector of {word!r} holds what is no number") from None


def _binary_words(path: Path, wanted: Callable[[str], bool]) -> Iterator[Entry]:
    with _bytes_of(path) as content:
        if content[:4] == _FASTTEXT_MODEL:
            raise ValueError(f"{path} is a fastText model: give its .vec file")
        start = content.find(b"\n", 0, 100) + 1
        said = _header(content[:start])
        if said is None:
            raise ValueError(f"{path} is not word2vec binary: it has no first line `words dim`")
        num, dim = said
        for i in range(num):
            end = content.find(b" ", start, start + _LONGEST_WORD_BYTES)
            stop = end + 1 + 4 * dim
            if end < 0 or stop > len(content):
                raise ValueError(f"{path} holds {i} words of {num}: the file is cut off")
            word = content[start:end].lstrip(b"\n").decode("utf-8", "replace")
            if wanted(word):
                yield word, np.frombuffer(content[end + 1 : stop], "<f4").astype(np.float32)
            start = stop


def _header(line: bytes) -> tuple[int, int] | None:
    """`words dim`, None where the line is something else."""
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
            raise ValueError(f"{path} is no whole gzip file ({error})") from None


@contextmanager
def _bytes_of(path: Path) -> Iterator[bytes | mmap.mmap]:
    with _open(path) as file:
        if path.suffix == ".gz" or not path.stat().st_size:
            yield file.read()
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content
