"""The folder to which shards are written: a local folder, or a folder at a URL.

`data/shards/writing/remote_output.py` implements it for URLs.
"""

import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from data.files import commit, temporary_path
from data.remote.config import check_url, is_url
from data.shards.index import INDEX_SUFFIX, ShardIndex, open_index
from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import MANIFEST, Manifest, ShardInfo, SourceInfo
from data.shards.writing.claim import claimed

WRITABLE = ("s3", "gs")
"""The URL schemes whose objects appear atomically when their upload completes."""

# Network file systems cache the information that a file does not exist, NFS for up to 60 s.
_VISIBLE_SECONDS = 90
_SHARED = "pass -o on a file system that all nodes share, or an s3:// or gs:// URL"


@dataclass(frozen=True)
class FinishedShard:
    """A shard whose tar and index have been written. duplicates: the number of samples that were
    dropped from it.
    """

    info: ShardInfo
    duplicates: int = 0


class OutputFolder(ABC):
    """A folder of shards that is being written. `str` returns the path or URL.

    It is pickled for the workers of a Ray cluster, so it contains no open files. Files appear
    atomically and are never changed in place.
    """

    @property
    @abstractmethod
    def folder(self) -> Path | str:
        """The path or the URL."""

    @abstractmethod
    def location(self, file: str) -> Path | str:
        """Return the path or URL of a file, for messages."""

    @abstractmethod
    def claimed(self, about: SourceInfo) -> AbstractContextManager[Callable[[], None]]:
        """Claim the folder while shards of the source `about` are written to it.

        Yields a function that raises ValueError if another process has taken the folder over.
        Raises ValueError, and changes nothing, if the folder contains other files or another
        process writes to it. If the block raises ValueError, the files written so far are deleted:
        the input must be changed, so the run cannot be resumed. A folder that was already finished
        keeps its shards.
        """

    @abstractmethod
    def files(self) -> set[str]:
        """Return the names of all files."""

    @abstractmethod
    def read(self, file: str, start: int = 0, size: int | None = None) -> bytes:
        """Return a byte range of a file. Raises FileNotFoundError if the file does not exist."""

    @abstractmethod
    def read_all(self, files: Sequence[str]) -> Iterator[bytes]:
        """Yield the content of each file."""

    @abstractmethod
    def write(self, file: str, content: bytes) -> None:
        """Write a small file."""

    @abstractmethod
    def staged(self, file: str) -> AbstractContextManager[Path]:
        """Yield the path of a new local file for `put`. It is deleted if it is not put."""

    @abstractmethod
    def put(self, staged: Path, file: str) -> None:
        """Write a file whose content is in the local file `staged`."""

    @abstractmethod
    def delete(self, files: Iterable[str]) -> None:
        """Delete those of `files` that exist."""

    @abstractmethod
    def finished(self, files: Iterable[str]) -> dict[str, FinishedShard]:
        """Return the shards that have been written completely, by file name.

        The index is written last, so its existence implies that the shard was complete.
        """

    @abstractmethod
    def index(self, file: str) -> ShardIndex:
        """Return the index of a shard. Raises FileNotFoundError or ValueError if it is damaged."""

    @abstractmethod
    def has_label_vectors(self, manifest: Manifest) -> bool:
        """Return whether the label vectors that `manifest` lists exist."""

    def check_outside_sets(self) -> None:
        """Raise ValueError if the folder is inside a set, which appending samples may delete."""
        return

    def check_shared(self) -> None:
        """Raise FileNotFoundError in a Ray task if its node does not have the folder."""
        return

    def check_visible(self, shard: ShardInfo) -> None:
        """Wait until a shard that a Ray task has written is visible on this machine.

        Raises FileNotFoundError if it is not: the task's node has another folder at this path.
        """
        return

    def manifest(self) -> Manifest | None:
        """Return the manifest, or None if there is none."""
        return Manifest.read(self.folder) if MANIFEST in self.files() else None

    def __str__(self) -> str:
        return str(self.folder)


class LocalOutput(OutputFolder):
    """A folder on this machine, or on a file system that all nodes of a Ray cluster share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def folder(self) -> Path:
        return self._folder

    def location(self, file: str) -> Path:
        return self._folder / file

    def claimed(self, about: SourceInfo) -> AbstractContextManager[Callable[[], None]]:
        return claimed(self._folder, about)

    def files(self) -> set[str]:
        return set(os.listdir(self._folder)) if self._folder.is_dir() else set()

    def check_outside_sets(self) -> None:
        for parent in self._folder.absolute().parents:
            if (parent / MANIFEST).is_file() and any(parent.glob(f"*{INDEX_SUFFIX}")):
                raise ValueError(
                    f"{self._folder} is inside the shards in {parent}: choose a folder outside, or "
                    f"add the samples to these shards with -o {parent} --append"
                )

    def check_shared(self) -> None:
        if not self._folder.is_dir():
            raise FileNotFoundError(
                f"{self._folder} does not exist on the Ray node {socket.gethostname()}: {_SHARED}"
            )

    def check_visible(self, shard: ShardInfo) -> None:
        end = time.monotonic() + _VISIBLE_SECONDS
        while shard.file not in self.finished([shard.file]):
            if time.monotonic() > end:
                raise FileNotFoundError(
                    f"{self.location(shard.file)} was written by another Ray node but does not "
                    f"exist on {socket.gethostname()}: {_SHARED}"
                )
            time.sleep(0.1)

    def read(self, file: str, start: int = 0, size: int | None = None) -> bytes:
        with self.location(file).open("rb", buffering=0) as opened:
            opened.seek(start)
            return opened.read(-1 if size is None else size)

    def read_all(self, files: Sequence[str]) -> Iterator[bytes]:
        return map(self.read, files)

    def write(self, file: str, content: bytes) -> None:
        commit(self.location(file), content)

    @contextmanager
    def staged(self, file: str) -> Iterator[Path]:
        with temporary_path(self.location(file)) as temporary:
            yield temporary
            temporary.unlink(missing_ok=True)

    def put(self, staged: Path, file: str) -> None:
        staged.replace(self.location(file))

    def delete(self, files: Iterable[str]) -> None:
        for file in files:
            self.location(file).unlink(missing_ok=True)

    def finished(self, files: Iterable[str]) -> dict[str, FinishedShard]:
        found = {file: self._finished(self.location(file)) for file in files}
        return {file: shard for file, shard in found.items() if shard is not None}

    def _finished(self, path: Path) -> FinishedShard | None:
        try:
            index = open_index(path)
        except (ValueError, FileNotFoundError):
            return None  # missing or damaged, so the shard is written again
        if not path.is_file() or path.stat().st_size != index.info.bytes:
            return None
        return FinishedShard(index.info, index.duplicates)

    def index(self, file: str) -> ShardIndex:
        return open_index(self.location(file))

    def has_label_vectors(self, manifest: Manifest) -> bool:
        try:
            load_label_vectors(self._folder, manifest)
        except (ValueError, OSError):
            return False
        return True


def output_folder(folder: Path | str) -> OutputFolder:
    """Return the folder at a path or URL. Raises ValueError for a URL that is not writable."""
    if not is_url(folder):
        return LocalOutput(Path(folder))
    url = check_url(str(folder))
    scheme, _, path = url.partition("://")
    if scheme == "file":
        return LocalOutput(Path(path))
    if scheme not in WRITABLE:
        raise ValueError(f"{url} is not writable: pass a local folder, or an s3:// or gs:// URL")
    from data.shards.writing.remote_output import RemoteOutput

    return RemoteOutput(url)
