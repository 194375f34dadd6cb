"""Collections that can be indexed: a folder of images or a file of texts.

Items are listed in a fixed order without being decoded. Memory use is bounded by the number of
names in the largest folder. `UnreadableFile` records the items that were omitted, and why.
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

_MAX_NAMED = 5


class Unreadable(NamedTuple):
    """A file, folder or line that cannot be read. `name` is its name in the collection."""

    name: str
    reason: str


class UnreadableFile:
    """Writes one JSON object per line, with `name` and `reason`. Keeps the first few in memory."""

    def __init__(self, path: Path) -> None:
        self._file, self.count = path.open("wb"), 0
        self.first: list[Unreadable] = []

    def add(self, unreadable: Unreadable) -> None:
        self.count += 1
        if self.count <= _MAX_NAMED:
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


# Larger files are unlikely to be images, and reading them would use too much memory.
_MAX_FILE_BYTES = 256 * 2**20
_MAX_LINE_BYTES = 2**20
# Longer texts are truncated for display.
_MAX_SHOWN_CHARS = 500


class Collection(Protocol):
    """A source of items. `ignored` counts the files that `items` has skipped because of their
    names."""

    reads: Reads
    path: Path
    ignored: int

    def items(self) -> Iterator[Item | Unreadable]:
        """Yield all items in the order of `order_of(reads)`."""
        ...

    def read(self, item: Item) -> bytes | str:
        """Return the input for `Model.prepare`. Raises OSError or ValueError with the reason."""
        ...

    def displayed(self, item: Item, raw: bytes | str) -> Item:
        """Return the item, with `text` set to what the gallery displays."""
        ...


def open_collection(path: Path, reads: Reads) -> Collection:
    """Open the collection at `path` for a model that reads images or texts.

    Raises FileNotFoundError if `path` is not a folder (for images) or a file (for texts).
    """
    if reads == "images":
        if not path.is_dir():
            raise FileNotFoundError(
                f"{path} is not a folder: the model requires images, so pass a folder of images"
            )
        return ImageCollection(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not a file: the model requires texts, so pass a file with one text per line"
        )
    return TextFile(path)


class ImageCollection:
    """All files with an image extension in a folder and its subfolders, excluding hidden files and
    folders.

    Symbolic links to folders are not followed. Links to files outside the folder are reported as
    unreadable.
    """

    reads: Reads = "images"

    def __init__(self, path: Path) -> None:
        self.path, self.ignored = path, 0
        self._root = os.path.realpath(path)

    def items(self) -> Iterator[Item | Unreadable]:
        self.ignored = 0
        # Use a stack instead of recursion, because folders may be nested arbitrarily deeply.
        stack = [self._names("")]
        while stack:
            for name in stack[-1]:
                if isinstance(name, Unreadable):
                    yield name
                elif (entry := self._inspect(name)) is None:
                    stack.append(self._names(f"{name}/"))
                    break
                elif isinstance(entry, Item | Unreadable):
                    yield entry
            else:
                stack.pop()

    def read(self, item: Item) -> bytes:
        if item.size > _MAX_FILE_BYTES:
            raise ValueError(f"size of {item.size} bytes exceeds the limit of {_MAX_FILE_BYTES}")
        with open(self._path(item.name), "rb") as file:
            return file.read(_MAX_FILE_BYTES)

    def displayed(self, item: Item, raw: bytes | str) -> Item:
        return item

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _names(self, prefix: str) -> Iterator[str | Unreadable]:
        try:
            names = sorted(os.listdir(self._path(prefix)))
        except OSError as error:
            yield Unreadable(prefix or ".", f"folder cannot be listed ({error.strerror})")
            return
        for name in names:
            yield prefix + name

    def _inspect(self, name: str) -> Item | Unreadable | bool | None:
        """Return the item, or an `Unreadable` with the reason. Returns None for a folder and True
        for an ignored file."""
        file = name.rpartition("/")[2]
        is_image = os.path.splitext(file)[1].lower() in ENDINGS and not file.startswith(".")
        try:
            status = os.lstat(self._path(name))
            if stat.S_ISDIR(status.st_mode) and not file.startswith("."):
                return None
            if not is_image:
                self.ignored += 1
                return True
            if stat.S_ISLNK(status.st_mode):
                if not os.path.realpath(self._path(name)).startswith(f"{self._root}/"):
                    return Unreadable(name, "link to a file outside the folder")
                status = os.stat(self._path(name))
        except OSError as error:
            return Unreadable(name, _reason(error))
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would block forever
            return Unreadable(name, "not a regular file")
        return Item(name, status.st_size, status.st_mtime_ns)


class TextFile:
    """A UTF-8 file with one text per line. Appending lines does not change existing items."""

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
                    yield Unreadable(
                        str(number), f"size of {size} bytes exceeds the limit of {_MAX_LINE_BYTES}"
                    )
                else:
                    text = _without_end(line)
                    yield Item(str(number), len(text), _fingerprint(text), start)
                start += size

    def read(self, item: Item) -> str:
        with self.path.open("rb") as file:
            file.seek(item.start)
            line = file.read(item.size)
        if _fingerprint(line) != item.stamp:
            raise ValueError("changed while it was being read")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"invalid UTF-8 at byte {error.start}") from error

    def displayed(self, item: Item, raw: bytes | str) -> Item:
        assert isinstance(raw, str)
        is_short = len(raw) <= _MAX_SHOWN_CHARS
        return item._replace(text=raw if is_short else raw[: _MAX_SHOWN_CHARS - 1] + "…")


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
    """Return the reason without the path, which callers print anyway."""
    return error.strerror or str(error)
