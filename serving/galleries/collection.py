"""Collections that can be indexed: a folder of images or a file of texts.

Items are listed in a fixed order without being decoded. Memory use is bounded by the number of
names in the largest folders.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from data.sources.image_files import ENDINGS
from serving.galleries.format import Item
from trainer.bundle.spec import Reads

# Larger files are unlikely to be images, and reading them would use too much memory.
_MAX_FILE_BYTES = 256 * 2**20
_MAX_LINE_BYTES = 2**20


class Unreadable(NamedTuple):
    """A file, folder or line that cannot be read. `name` is its name in the collection."""

    name: str
    reason: str


class ImageCollection:
    """All files with an image extension in a folder and its subfolders, excluding hidden files and
    folders.

    Symbolic links to folders are not followed. Links to files outside the folder are reported as
    unreadable. `ignored` counts the files without an image extension.
    """

    reads: Reads = "images"

    def __init__(self, path: Path) -> None:
        self.path, self.ignored = path, 0
        self._root = os.path.realpath(path)

    def items(self) -> Iterator[Item | Unreadable]:
        """Yield all items in the order of their path components."""
        self.ignored = 0
        # Use a stack instead of recursion, because folders may be nested arbitrarily deeply.
        stack = self._names("")
        while stack:
            entry = stack.pop()
            if isinstance(entry, Unreadable):
                yield entry
                continue
            path, is_hidden = self._path(entry), entry.rpartition("/")[2].startswith(".")
            found: Item | Unreadable
            try:
                status = os.lstat(path)
                if stat.S_ISDIR(status.st_mode) and not is_hidden:
                    stack += self._names(f"{entry}/")
                    continue
                if is_hidden or os.path.splitext(entry)[1].lower() not in ENDINGS:
                    self.ignored += 1
                    continue
                is_link = stat.S_ISLNK(status.st_mode)
                if is_link and not os.path.realpath(path).startswith(f"{self._root}/"):
                    found = Unreadable(entry, "link to a file outside the folder")
                elif not stat.S_ISREG((status := os.stat(path)).st_mode):
                    found = Unreadable(entry, "not a regular file")  # a pipe would block forever
                else:
                    found = Item(entry, status.st_size, status.st_mtime_ns)
            except OSError as error:
                found = Unreadable(entry, reason(error))
            yield found

    def read(self, item: Item) -> bytes:
        """Return the input for `Model.prepare`. Raises OSError or ValueError with the reason."""
        if item.size > _MAX_FILE_BYTES:
            raise ValueError(f"size of {item.size} bytes exceeds the limit of {_MAX_FILE_BYTES}")
        with open(self._path(item.name), "rb") as file:
            return file.read(_MAX_FILE_BYTES)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _names(self, prefix: str) -> list[str | Unreadable]:
        """Return the names in a folder in descending order."""
        try:
            return [prefix + name for name in sorted(os.listdir(self._path(prefix)), reverse=True)]
        except OSError as error:
            return [Unreadable(prefix or ".", f"folder cannot be listed ({error.strerror})")]


class TextFile:
    """A UTF-8 file with one text per line. Appending lines does not change existing items."""

    reads: Reads = "texts"

    def __init__(self, path: Path) -> None:
        self.path, self.ignored = path, 0

    def items(self) -> Iterator[Item | Unreadable]:
        """Yield all lines in order."""
        with self.path.open("rb") as file:
            start = 3 if file.read(3) == b"\xef\xbb\xbf" else 0
            file.seek(start)
            number = 0
            while line := file.readline(_MAX_LINE_BYTES):
                number += 1
                size = len(line)
                if size == _MAX_LINE_BYTES and not line.endswith(b"\n"):
                    while rest := file.readline(_MAX_LINE_BYTES):
                        size += len(rest)
                        if rest.endswith(b"\n"):
                            break
                    yield Unreadable(
                        str(number), f"size of {size} bytes exceeds the limit of {_MAX_LINE_BYTES}"
                    )
                else:
                    text = line.removesuffix(b"\n").removesuffix(b"\r")
                    yield Item(str(number), len(text), _fingerprint(text), start)
                start += size

    def read(self, item: Item) -> str:
        """Return the input for `Model.prepare`. Raises OSError or ValueError with the reason."""
        with self.path.open("rb") as file:
            file.seek(item.start)
            line = file.read(item.size)
        if _fingerprint(line) != item.stamp:
            raise ValueError("changed while it was being read")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"invalid UTF-8 at byte {error.start}") from error


Collection = ImageCollection | TextFile


def open_collection(path: Path, reads: Reads) -> Collection:
    """Open the collection at `path` for a model that reads images or texts.

    Raises FileNotFoundError if `path` is not a folder (for images) or a file (for texts).
    """
    if reads == "images" and not path.is_dir():
        remedy = "folder: the model requires images, so pass a folder of images"
    elif reads == "texts" and not path.is_file():
        remedy = "file: the model requires texts, so pass a file with one text per line"
    else:
        return ImageCollection(path) if reads == "images" else TextFile(path)
    raise FileNotFoundError(f"{path} is not a {remedy}")


def _fingerprint(line: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(line, digest_size=8).digest()) >> 1


def reason(error: OSError | ValueError) -> str:
    """Return the reason without the path, which callers print anyway."""
    return getattr(error, "strerror", None) or str(error)
