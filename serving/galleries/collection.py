"""The input of an index: a folder of images or a file of texts. Streams its items in a fixed order.

Nothing is decoded here. Memory use is bounded by the names in the largest single folder.
`UnreadableFile` records what is left out of the gallery, and why.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Protocol

from data.files import flush
from data.sources.layouts.class_folders import ENDINGS
from serving.galleries.format import Item
from trainer.bundle.spec import Reads

_NAMED = 5


class Unreadable(NamedTuple):
    """A file, folder or line that cannot be read, by its name in the collection."""

    name: str
    reason: str


class UnreadableFile:
    """Writes `{"name", "reason"}` per line, and keeps the first few in memory."""

    def __init__(self, path: Path) -> None:
        self._file, self.count = path.open("wb"), 0
        self.first: list[Unreadable] = []

    def add(self, unreadable: Unreadable) -> None:
        self.count += 1
        if self.count <= _NAMED:
            self.first.append(unreadable)
        self._file.write(json.dumps(unreadable._asdict()).encode() + b"\n")

    def flush(self) -> None:
        flush(self._file)

    def __enter__(self) -> "UnreadableFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._file.close()


# A larger file is unlikely to be an image, and reading it would use too much memory.
_MAX_FILE_BYTES = 256 * 2**20
_MAX_LINE_BYTES = 2**20
# Number of characters of a text that are kept for display.
_SHOWN = 500


class Collection(Protocol):
    """`ignored` counts the files that `items` skipped because they do not look like items."""

    reads: Reads
    path: Path
    ignored: int

    def items(self) -> Iterator[Item | Unreadable]:
        """All items in the order of `order_of(reads)`."""
        ...

    def read(self, item: Item) -> bytes | str:
        """The input of the model's `prepare`. Raises OSError or ValueError with the reason."""
        ...

    def shown(self, item: Item, raw: bytes | str) -> Item:
        """The item with what the gallery displays of it."""
        ...


def open_collection(path: Path, reads: Reads) -> Collection:
    """Open a collection for a model that `reads` this kind of input. Raises FileNotFoundError if
    `path` is not a folder of images, or not a file of texts."""
    if reads == "images":
        if not path.is_dir():
            raise FileNotFoundError(
                f"{path} is no folder: the model reads images, name a folder of them"
            )
        return ImageCollection(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is no file: the model reads texts, name a file of texts, one a line"
        )
    return TextFile(path)


class ImageCollection:
    """Files with an image extension in a folder and all of its subfolders, except hidden ones.

    Symbolic links to folders are not followed. A link to a file outside of the folder is
    unreadable.
    """

    reads: Reads = "images"

    def __init__(self, path: Path) -> None:
        self.path, self.ignored = path, 0
        self._root = os.path.realpath(path)

    def items(self) -> Iterator[Item | Unreadable]:
        self.ignored = 0
        # a stack instead of recursion, because folders may be nested arbitrarily deep
        waiting = [self._names("")]
        while waiting:
            for name in waiting[-1]:
                if isinstance(name, Unreadable):
                    yield name
                elif (found := self._inspect(name)) is None:
                    waiting.append(self._names(f"{name}/"))
                    break
                elif isinstance(found, Item | Unreadable):
                    yield found
            else:
                waiting.pop()

    def read(self, item: Item) -> bytes:
        if item.size > _MAX_FILE_BYTES:
            raise ValueError(f"{item.size} bytes are over the limit of {_MAX_FILE_BYTES}")
        with open(self._path(item.name), "rb") as file:
            return file.read(_MAX_FILE_BYTES)

    def shown(self, item: Item, raw: bytes | str) -> Item:
        return item

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _names(self, prefix: str) -> Iterator[str | Unreadable]:
        try:
            names = sorted(os.listdir(self._path(prefix)))
        except OSError as error:
            yield Unreadable(prefix or ".", f"a folder that cannot be listed ({error.strerror})")
            return
        for name in names:
            yield prefix + name

    def _inspect(self, name: str) -> Item | Unreadable | bool | None:
        """The item, or why it cannot be read; None for a folder; True for an ignored file, which is
        counted."""
        file = name.rpartition("/")[2]
        is_image = os.path.splitext(file)[1].lower() in ENDINGS and not file.startswith(".")
        try:
            about = os.lstat(self._path(name))
            if stat.S_ISDIR(about.st_mode) and not file.startswith("."):
                return None
            if not is_image:
                self.ignored += 1
                return True
            if stat.S_ISLNK(about.st_mode):
                if not os.path.realpath(self._path(name)).startswith(f"{self._root}/"):
                    return Unreadable(name, "a link out of the folder")
                about = os.stat(self._path(name))
        except OSError as error:
            return Unreadable(name, _reason(error))
        if not stat.S_ISREG(about.st_mode):  # reading a pipe would block forever
            return Unreadable(name, "no regular file")
        return Item(name, about.st_size, about.st_mtime_ns)


class TextFile:
    """Lines of a UTF-8 file, each a text. Appending lines leaves the existing items unchanged."""

    reads: Reads = "texts"

    def __init__(self, path: Path) -> None:
        self.path, self.ignored = path, 0

    def items(self) -> Iterator[Item | Unreadable]:
        start = 0
        with self.path.open("rb") as file:
            if file.read(3) == b"\xef\xbb\xbf":
                start = 3
            file.seek(start)
            number = 0
            while line := file.readline(_MAX_LINE_BYTES):
                number += 1
                size = len(line)
                if size == _MAX_LINE_BYTES and not line.endswith(b"\n"):
                    size += _rest_of_line(file)
                    yield Unreadable(str(number), f"{size} bytes, at most {_MAX_LINE_BYTES}")
                else:
                    text = _without_end(line)
                    yield Item(str(number), len(text), _fingerprint(text), start)
                start += size

    def read(self, item: Item) -> str:
        with self.path.open("rb") as file:
            file.seek(item.start)
            line = file.read(item.size)
        if _fingerprint(line) != item.stamp:
            raise ValueError("changed while it was read")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 from its byte {error.start} on") from error

    def shown(self, item: Item, raw: bytes | str) -> Item:
        assert isinstance(raw, str)
        return item._replace(text=raw if len(raw) <= _SHOWN else raw[: _SHOWN - 1] + "…")


def _rest_of_line(file: IO[bytes]) -> int:
    size = 0
    while part := file.readline(_MAX_LINE_BYTES):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _without_end(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r")


def _fingerprint(line: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(line, digest_size=8).digest()) >> 1


def _reason(error: OSError) -> str:
    """The reason without the path, which is already part of the output."""
    return error.strerror or str(error)
