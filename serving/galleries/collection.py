"""Collections that can be indexed: a folder of images or a file of texts.

Entries are listed in a fixed order without being read.
"""

import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data.sources.input_files import is_image_name
from trainer.bundle.spec import Reads

# Larger files are unlikely to be images, and reading them would use too much memory.
_MAX_FILE_BYTES = 256 * 2**20
_MAX_LINE_BYTES = 2**20


class Entry(NamedTuple):
    """A file or line of a collection. `name` is its path relative to the folder, separated by "/",
    or its line number. `read` returns the input for `Model.prepare`, or raises OSError or
    ValueError with the reason."""

    name: str
    read: Callable[[], bytes | str]


class ImageCollection:
    """All files with an image extension in a folder and its subfolders, excluding hidden files and
    folders.

    Symbolic links to folders are not followed. Links to files outside the folder cannot be read.
    `ignored` counts the other files.
    """

    reads: Reads = "images"

    def __init__(self, path: Path) -> None:
        self.path, self.ignored = path, 0
        self._root = os.path.realpath(path)

    def entries(self) -> Iterator[Entry]:
        """Yield the images of each folder in the order of their names, then its subfolders."""
        self.ignored = 0
        unlisted: list[OSError] = []
        for folder, folders, names in os.walk(self._root, onerror=unlisted.append):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                if is_image_name(name):
                    path = os.path.relpath(os.path.join(folder, name), self._root)
                    yield Entry(path, partial(self._read, path))
                else:
                    self.ignored += 1
        for error in unlisted:
            yield Entry(os.path.relpath(error.filename, self._root), partial(_raise, error))

    def _read(self, name: str) -> bytes:
        path = f"{self._root}/{name}"
        if os.path.islink(path) and not os.path.realpath(path).startswith(f"{self._root}/"):
            raise ValueError("link to a file outside the folder")
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")  # a pipe would block forever
        if status.st_size > _MAX_FILE_BYTES:
            raise ValueError(
                f"size of {status.st_size} bytes exceeds the limit of {_MAX_FILE_BYTES}"
            )
        return Path(path).read_bytes()


class TextFile:
    """A UTF-8 file with one text per line."""

    reads: Reads = "texts"

    def __init__(self, path: Path) -> None:
        self.path, self.ignored = path, 0

    def entries(self) -> Iterator[Entry]:
        """Yield all lines in order."""
        with self.path.open("rb") as file:
            if file.read(3) != b"\xef\xbb\xbf":
                file.seek(0)
            number = 0
            while line := file.readline(_MAX_LINE_BYTES):
                number, size, part = number + 1, len(line), line
                while not part.endswith(b"\n") and (part := file.readline(_MAX_LINE_BYTES)):
                    size += len(part)
                yield Entry(str(number), partial(_text, line, size))


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


def _text(line: bytes, size: int) -> str:
    """Decode a line of `size` bytes, of which `line` may be only the beginning."""
    if size > _MAX_LINE_BYTES:
        raise ValueError(f"size of {size} bytes exceeds the limit of {_MAX_LINE_BYTES}")
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start}") from error


def _raise(error: OSError) -> bytes:
    raise OSError(f"folder cannot be listed ({error.strerror})")
