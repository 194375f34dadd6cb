"""A folder of an object store to which shards are written, through fsspec.

An object appears when its upload is complete, and replaces an earlier object of the same name
atomically. Failures of the network and the server are retried.
"""

import errno
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from data.files import explained as explained_write
from data.remote.config import file_url
from data.remote.fetch import explained, file_system
from data.retry import retried
from data.shards.index import HEADER_BYTES, ShardIndex, index_path, map_index, read_header
from data.shards.manifest import Manifest, SourceInfo
from data.shards.writing.output import FinishedShard, OutputFolder

Answer = TypeVar("Answer")

_PART_BYTES = 1 << 24  # of an upload; backends send up to 10 parts at the same time
_REQUESTS_AT_ONCE = 64


class RemoteOutput(OutputFolder):
    """The folder at an s3:// or gs:// URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def folder(self) -> str:
        return self._url

    def location(self, file: str) -> str:
        return file_url(self._url, file)

    def claimed(self, about: SourceInfo) -> AbstractContextManager[Callable[[], None]]:
        from data.shards.writing.remote_claim import claimed

        return claimed(self, about)

    def files(self) -> set[str]:
        return set(self._sizes())

    def _sizes(self) -> dict[str, int]:
        """Map the name of each file to its size in bytes."""
        # An object store does not distinguish an empty folder from a missing one.
        try:
            entries = self._call("read", "", lambda files: files.ls(self._url, detail=True))
        except FileNotFoundError:
            return {}
        prefix = self._url.partition("://")[2] + "/"
        sizes = {entry["name"].strip("/"): entry["size"] or 0 for entry in entries}
        return {
            name.removeprefix(prefix): size
            for name, size in sizes.items()
            if name.startswith(prefix)
        }

    def read(self, file: str, start: int = 0, size: int | None = None) -> bytes:
        end = None if size is None else start + size
        url = self.location(file)
        content: bytes = self._call(
            "read", file, lambda files: files.cat_file(url, start=start or None, end=end)
        )
        return content

    def read_all(self, files: Sequence[str]) -> Iterator[bytes]:
        return self._starts(files, None)

    def _starts(self, files: Iterable[str], size: int | None) -> Iterator[bytes]:
        """Yield the first `size` bytes of each file. Several files are read at the same time."""
        left = iter(files)
        while some := list(islice(left, _REQUESTS_AT_ONCE)):
            urls = [self.location(file) for file in some]
            yield from self._call("read", some[0], partial(_first_bytes, urls=urls, size=size))

    def write(self, file: str, content: bytes) -> None:
        url = self.location(file)
        self._call("written", file, lambda files: files.pipe_file(url, content))

    def create(self, file: str, content: bytes) -> bool:
        """Write a file and return True, or return False if the file exists.

        If the server does not support conditional writes, the file is overwritten.
        """
        url = self.location(file)

        def create(files: Any) -> bool:
            try:
                files.pipe_file(url, content, mode="create")
            except OSError as error:
                if isinstance(error, FileExistsError) or error.errno == errno.EINVAL:
                    return False  # s3fs maps the status 412 to one of these
                if error.errno != errno.ENOSYS:
                    raise
                files.pipe_file(url, content)
            except Exception as error:
                if str(getattr(error, "code", None)) != "412":  # gcsfs
                    raise
                return False
            return True

        return self._call("written", file, create)

    @contextmanager
    def staged(self, file: str) -> Iterator[Path]:
        # The file has no name, so its space is freed even if this process is killed.
        with (
            explained_write(Path(tempfile.gettempdir())),
            tempfile.TemporaryFile(prefix="kway-shard-") as opened,
        ):
            yield Path(f"/proc/self/fd/{opened.fileno()}")

    def put(self, staged: Path, file: str) -> None:
        url = self.location(file)
        self._call(
            "written", file, lambda files: files.put_file(str(staged), url, chunksize=_PART_BYTES)
        )

    def delete(self, files: Iterable[str]) -> None:
        present = self.files()
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            deque(pool.map(self._delete, (file for file in files if file in present)), maxlen=0)

    def _delete(self, file: str) -> None:
        # Unlike `rm`, `rm_file` does not interpret `*` and `[` in the name as a pattern.
        url = self.location(file)
        with suppress(FileNotFoundError):
            self._call("deleted", file, lambda files: files.rm_file(url))

    def finished(self, files: Iterable[str]) -> dict[str, FinishedShard]:
        sizes = self._sizes()
        complete = [file for file in files if file in sizes and _index_of(file) in sizes]
        starts = self._starts(map(_index_of, complete), HEADER_BYTES)
        found = {}
        for file, start in zip(complete, starts, strict=True):
            try:
                header = read_header(start)
            except ValueError:
                continue  # damaged, so the shard is written again
            expected = (header.info.file, header.info.bytes, header.num_bytes)
            if expected == (file, sizes[file], sizes[_index_of(file)]):
                found[file] = FinishedShard(header.info, header.duplicates)
        return found

    def index(self, file: str) -> ShardIndex:
        content = self.read(_index_of(file))
        with tempfile.NamedTemporaryFile() as copy:
            copy.write(content)
            copy.flush()
            try:
                return map_index(Path(copy.name))
            except ValueError as error:
                raise ValueError(
                    f"{self.location(_index_of(file))} {error}: delete it and run kway shard again"
                ) from error

    def has_label_vectors(self, manifest: Manifest) -> bool:
        return manifest.label_vectors in self.files()

    def _call(self, operation: str, file: str, call: Callable[[Any], Answer]) -> Answer:
        """Return `call(file system)`. Retries after a transient error."""
        url = self.location(file) if file else self._url

        def attempt() -> Answer:
            with explained(url, operation):
                # Other processes write to the folder, so its listing must not be cached.
                return call(file_system(url, use_listings_cache=False))

        return retried(url, attempt)


def _first_bytes(system: Any, urls: list[str], size: int | None) -> list[bytes]:
    found: list[bytes | Exception] = system.cat_ranges(urls, None if size is None else 0, size)
    for error in found:
        if isinstance(error, Exception):
            raise error
    return [content for content in found if isinstance(content, bytes)]


def _index_of(shard: str) -> str:
    return index_path(Path(shard)).name
