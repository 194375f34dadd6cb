"""A file or folder at a URL, with the part of the interface of `pathlib.Path` that sources use.

A folder is listed once, recursively, when its entries are first needed. Its files then answer
`is_file` and `stat` from this listing. A pickled path contains only the URL, so it can be opened on
another machine.
"""

import io
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple, TypeVar

from data.remote.fetch import explained, fetch, file_system
from data.retry import ATTEMPTS, retried

Answer = TypeVar("Answer")

_MISSING = (404, 410)
_FIRST_WINDOW, _LAST_WINDOW = 1 << 16, 1 << 23


class _Stat(NamedTuple):
    st_size: int


Node = dict[str, "Node | int"]
"""A folder: its entries by name. A file is represented by its size."""


class RemotePath:
    """A file or folder at a URL.

    Raises FileNotFoundError, PermissionError or RetriesExhaustedError, each with the URL, if it
    cannot be read. Transient errors are retried (`data/retry.py`).
    """

    def __init__(self, url: str, root: "RemotePath | None" = None) -> None:
        self._url = url
        self._root = root or self

    def __truediv__(self, name: str) -> "RemotePath":
        parts = [part for part in name.split("/") if part not in ("", ".")]
        return RemotePath("/".join([self._url, *parts]), self._root) if parts else self

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __lt__(self, other: Any) -> bool:
        return self._url < str(other)

    def __hash__(self) -> int:
        return hash(self._url)

    def __reduce__(self) -> tuple[type["RemotePath"], tuple[str]]:
        return RemotePath, (self._url,)

    @property
    def name(self) -> str:
        return PurePosixPath(self._url).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self._url).suffix

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self._url.rpartition("/")[0], None if self is self._root else self._root)

    def with_suffix(self, suffix: str) -> "RemotePath":
        return self.parent / f"{self.name.removesuffix(self.suffix)}{suffix}"

    def relative_to(self, other: Any) -> PurePosixPath:
        return PurePosixPath(self._url).relative_to(str(other))

    def resolve(self) -> "RemotePath":
        return self

    def is_symlink(self) -> bool:
        return False

    @property
    def has_listing(self) -> bool:
        """Whether the server can list folders, which HTTP servers cannot."""
        return not self._url.startswith(("http:", "https:"))

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return self._size is not None

    def is_dir(self) -> bool:
        """Return whether there are files below this URL. HTTP has no listings, so this is False."""
        return isinstance(self._node, dict)

    def stat(self) -> _Stat:
        if self._size is None:
            raise FileNotFoundError(f"{self} does not exist: check the URL")
        return _Stat(self._size)

    def iterdir(self) -> Iterator["RemotePath"]:
        yield from (self / name for name in self._node or ())  # type: ignore[union-attr]

    def walk(self) -> Iterator[tuple["RemotePath", list[str], list[str]]]:
        """Yield the same as `data.files.walk_directory`."""
        folders: list[str] = []
        names: list[str] = []
        for name, node in (self._node or {}).items():  # type: ignore[union-attr]
            (folders if isinstance(node, dict) else names).append(name)
        yield self, folders, names
        for folder in folders:
            yield from (self / folder).walk()

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """Yield the files that match `pattern`, which does not contain `**`."""
        depth = len(PurePosixPath(pattern).parts)
        return (p for p in self.rglob(pattern) if len(p.relative_to(self).parts) == depth)

    def rglob(self, pattern: str) -> Iterator["RemotePath"]:
        """Yield the files below this folder, at any depth, that match `pattern`."""
        for parent, _, names in self.walk():
            yield from (parent / n for n in names if (parent / n).relative_to(self).match(pattern))

    def read_bytes(self) -> bytes:
        # Otherwise, s3fs requests the size first, to read large files in parallel.
        options = {"max_concurrency": 1} if self._url.startswith("s3:") else {}
        content: bytes = self._do(lambda files: files.cat_file(self._url, **options))
        return content

    def read_range(self, offset: int, size: int) -> bytes:
        """Return bytes [offset, offset + size) of a file that is long enough."""
        if not size:
            return b""
        content: bytes = self._do(
            lambda files: files.cat_file(self._url, start=offset, end=offset + size)
        )
        # A server that does not support ranges sends the whole file.
        return content if len(content) <= size else content[offset : offset + size]

    def open(self, mode: str = "rb", buffering: int = -1) -> IO[bytes]:
        """Open the file for reading and seeking. It is read in ranges of up to 8 MiB."""
        assert mode == "rb"
        raw = _Ranges(self)
        return raw if buffering == 0 else io.BufferedReader(raw)  # type: ignore[return-value]

    def copy_to(self, file: IO[bytes]) -> None:
        """Write the content to `file`, which is empty."""
        size = self.stat().st_size
        fetch(self._url, file, attempts=ATTEMPTS, max_bytes=size, exact=True)

    def _do(self, operation: Callable[[Any], Answer]) -> Answer:
        def attempt() -> Answer:
            with explained(self._url):
                try:
                    # Without this option, s3fs keeps listings forever.
                    return operation(file_system(self._url, use_listings_cache=False))
                except FileNotFoundError as error:
                    # For HTTP, fsspec reports every failure to get the size as a missing file.
                    cause = error.__cause__
                    if self.has_listing or getattr(cause, "status", None) in _MISSING:
                        raise
                    raise cause or error from None

        try:
            return retried(self._url, attempt)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self} does not exist: check the URL") from error

    @cached_property
    def _size(self) -> int | None:
        """The size of a file, or None if there is no file at this URL."""
        if self._root is not self and self.has_listing:
            node = self._node
            return node if isinstance(node, int) else None
        try:
            info = self._do(lambda files: files.info(self._url))
        except FileNotFoundError:
            return None
        if info["type"] != "file":
            return None
        if info["size"] is None:
            raise ValueError(f"{self}: the server does not report the size: copy the file")
        return int(info["size"])

    @property
    def _node(self) -> Node | int | None:
        """The entry in the listing of the root, or None."""
        node: Node | int | None = self._root._tree
        for part in self._url[len(self._root._url) :].split("/")[1:]:
            node = node.get(part) if isinstance(node, dict) else None
        return node

    @cached_property
    def _tree(self) -> Node | None:
        """The listing of this folder."""
        if not self.has_listing:
            return None
        found = self._do(lambda files: files.find(self._url, detail=True))
        prefix = self._url.partition("://")[2].strip("/")
        tree: Node = {}
        for name, about in found.items():
            parts = name.strip("/").removeprefix(prefix).split("/")[1:]
            if about["type"] != "file" or name.endswith("/") or not parts:
                continue
            node: Any = tree
            for part in parts[:-1]:
                node = node.setdefault(part, {}) if isinstance(node, dict) else None
            if {"", ".", ".."} & set(parts) or not isinstance(node, dict) or parts[-1] in node:
                raise ValueError(f"{self}/{'/'.join(parts)} is not the path of one file: rename it")
            node[parts[-1]] = about["size"]
        return tree or None


class _Ranges(io.RawIOBase):
    """A file that is read in ranges.

    While it is read forward, possibly with gaps, the ranges grow from 64 KiB to 8 MiB.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._at = 0
        self._start, self._window, self._length = 0, b"", _FIRST_WINDOW // 2

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._path.stat().st_size}
        self._at = start[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._path.stat().st_size - self._at)
        wanted = min(len(buffer), left)
        end = self._start + len(self._window)
        if not self._start <= self._at <= self._at + wanted <= end:
            is_near = self._start <= self._at <= end + self._length
            self._length = min(2 * self._length, _LAST_WINDOW) if is_near else _FIRST_WINDOW
            size = min(max(wanted, self._length), left)
            self._window, self._start = self._path.read_range(self._at, size), self._at
        first = self._at - self._start
        found = self._window[first : first + wanted]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
