"""The state folder of a server, with an SQLite file that keeps watches across restarts.

Two locks exclude other servers. `kway serve` holds the lock of the folder as long as it runs. The
process that stores the watches holds SQLite's exclusive lock of the file, so after `kway serve` is
killed, its successor waits until that process has died too.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from serving.watches.watch import WatchesDownError

# "kway" in ASCII, and the version of the contents.
_APPLICATION_ID, _FORMAT = 0x6B776179, 1
_BUSY_SECONDS = 30
_FILE, _LOCK = "state.sqlite3", "lock"
# FULL: a commit is on the disk before an answer is sent, so it also survives a power failure.
# EXCLUSIVE: the file has one writer, and no other process needs shared memory to read it.
_PRAGMAS = ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL")


class StateFile:
    """`Storage` in an SQLite file in `folder`, which is created if it does not exist.

    Raises ValueError if the file is damaged or has another format, and OSError if it cannot be
    opened.
    """

    def __init__(self, folder: Path, *, busy_seconds: float = _BUSY_SECONDS) -> None:
        self._path, self._lock = folder / _FILE, Lock()
        # SQLite creates the files of its log with the mode of this file.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        self._connection = sqlite3.connect(
            self._path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
        )
        try:
            with _readable_errors(self._path):
                self._open()
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def verify(self) -> None:
        """Raise ValueError if the file is damaged."""
        with _readable_errors(self._path):
            (found,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise _damaged(self._path, found)

    def items(self) -> Iterator[tuple[str, bytes]]:
        yield from self._connection.execute("SELECT key, value FROM entries ORDER BY key")

    def apply(self, changes: Mapping[str, bytes | None]) -> None:
        written = [(key, value) for key, value in changes.items() if value is not None]
        deleted = [(key,) for key, value in changes.items() if value is None]
        try:
            with self._transaction() as connection:
                connection.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?)", written)
                connection.executemany("DELETE FROM entries WHERE key = ?", deleted)
        except sqlite3.Error as error:
            message = f"the server cannot write its state file {self._path.name} ({error})"
            raise WatchesDownError(message) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _open(self) -> None:
        for pragma in _PRAGMAS:
            self._connection.execute(f"PRAGMA {pragma}")
        with self._transaction() as connection:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if (application, found, tables) == (0, 0, 0):
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {_FORMAT}")
                connection.execute(
                    "CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
                )
            elif application != _APPLICATION_ID:
                raise ValueError(
                    f"{self._path} was not written by kway. Pass another folder with --state"
                )
            elif found != _FORMAT:
                raise ValueError(
                    f"{self._path} has format {found}, but this version of kway reads format "
                    f"{_FORMAT}. Start the version that wrote it, or pass another folder with "
                    "--state"
                )


def default_folder(bundle: Path) -> Path:
    """Return the state folder of a bundle's server: next to the bundle, whose own files are
    verified. If the bundle is a symbolic link, the folder is next to the link, so that a new target
    has the same watches."""
    absolute = Path(os.path.abspath(bundle))
    return absolute.with_name(f"{absolute.name}-state")


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Create the state folder, check its file, and exclude other servers inside the context.

    Raises OSError if another server uses the folder or it cannot be written, and ValueError if the
    file is damaged or has another format.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise OSError(
            f"the state folder {folder} cannot be written ({error.strerror}). Pass a writable "
            "folder with --state"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(
                f"another server uses the state folder {folder}. Stop it, or pass another folder "
                "with --state"
            ) from None
        file = StateFile(folder)
        try:
            file.verify()
        finally:
            file.close()
        yield
    finally:
        os.close(lock)


@contextmanager
def _readable_errors(path: Path) -> Iterator[None]:
    """Convert SQLite's errors to one line that names the file and the fix."""
    try:
        yield
    except sqlite3.OperationalError as error:  # locked, no space, no permission
        raise OSError(
            f"the state file {path} cannot be opened ({error}). Stop the process that uses it, or "
            "pass another folder with --state"
        ) from error
    except sqlite3.DatabaseError as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"the state file {path} is damaged ({reason}). Restore a copy, or move it and the files "
        f"{path.name}-* away to start without watches"
    )
