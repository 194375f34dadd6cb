"""Input files and folders of sources: local paths and URLs."""

import os
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import IO, Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator

from data.remote.config import check_url, is_url
from data.remote.path import RemotePath

_FILE = "file://"


class _HasSize(Protocol):
    @property
    def st_size(self) -> int: ...


class InputPath(Protocol):
    """A `Path` or a `RemotePath`, which can be read but not written."""

    def __truediv__(self, name: str, /) -> "InputPath": ...
    def __lt__(self, other: Any, /) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def suffix(self) -> str: ...
    @property
    def parent(self) -> "InputPath": ...
    def with_suffix(self, suffix: str) -> "InputPath": ...
    def relative_to(self, other: Any, /) -> PurePath: ...
    def resolve(self) -> "InputPath": ...
    def exists(self) -> bool: ...
    def is_file(self) -> bool: ...
    def is_dir(self) -> bool: ...
    def is_symlink(self) -> bool: ...
    def stat(self) -> _HasSize: ...
    def iterdir(self) -> "Iterable[InputPath]": ...
    def glob(self, pattern: str) -> "Iterable[InputPath]": ...
    def rglob(self, pattern: str) -> "Iterable[InputPath]": ...
    def read_bytes(self) -> bytes: ...
    def open(self, mode: Literal["rb"], buffering: int = -1) -> IO[bytes]: ...


def input_path(given: str | Path | RemotePath) -> Path | RemotePath:
    """Convert a text to a local path or, if it is a URL, to a `RemotePath`.

    Raises ValueError for an unsupported URL.
    """
    if not isinstance(given, str):
        return given
    if not is_url(given):
        return Path(given)
    url = check_url(given)
    return Path(url.removeprefix(_FILE)) if url.startswith(_FILE) else RemotePath(url)


Input = Annotated[Path | RemotePath, BeforeValidator(input_path)]
"""The type of a field for an input file or folder."""


def read_range(path: Path | RemotePath, offset: int, size: int) -> bytes:
    """Return bytes [offset, offset + size) of a file, or fewer at the end of a local file."""
    if isinstance(path, RemotePath):
        return path.read_range(offset, size)
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), size, offset)


def check_folder(path: InputPath, remedy: str) -> None:
    """Raise FileNotFoundError if `path` is not a folder."""
    if path.is_dir():
        return
    if isinstance(path, RemotePath) and not path.has_listing:
        raise ValueError(
            f"{path}: HTTP servers do not list folders: copy the folder, or use s3:// or gs://"
        )
    raise FileNotFoundError(f"{path} is not a folder: {remedy}")
