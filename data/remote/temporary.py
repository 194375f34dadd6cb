"""Downloads to temporary files without a name, for files that are read once and not cached."""

import hashlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import IO

from data.files import explained
from data.remote.fetch import REMEDY, pieces
from data.retry import TransientError, wait_before_retry


@contextmanager
def unnamed_file() -> Iterator[IO[bytes]]:
    """Yield an empty file in the temporary folder ($TMPDIR). Its `name` is a path that opens it
    again while the block runs.

    The file has no directory entry, so its disk space is freed even if the process is killed.
    """
    with TemporaryFile() as held, open(f"/dev/fd/{held.fileno()}", "r+b") as file:
        yield file


def download(url: str, file: IO[bytes], *, attempts: int, max_bytes: int, sha256: str) -> None:
    """Write the content at `url` to `file`, even if it is not the expected content.

    Transient failures are retried. Content whose SHA-256 is not `sha256` is accepted if two
    downloads in succession are identical, so that only damage at the source remains. Raises the
    errors of `pieces`, RetriesExhaustedError, and ValueError if there are more than `max_bytes`.
    """
    before = None
    for attempt in range(1, attempts + 1):
        try:
            received = _received(url, file, max_bytes)
        except TransientError as error:
            failure = error
        else:
            if received in (sha256, before):
                return
            before = received
            failure = TransientError("its SHA-256 differs")
        wait_before_retry(url, failure, attempt, attempts=attempts, remedy=REMEDY)


def _received(url: str, file: IO[bytes], max_bytes: int) -> str:
    """Write the content to the beginning of `file` and return its SHA-256."""
    file.seek(0)
    file.truncate()
    digest, size = hashlib.sha256(), 0
    with closing(pieces(url)) as stream:
        for piece in stream:
            size += len(piece)
            if size > max_bytes:
                raise ValueError(f"{url} has more than {max_bytes:,} bytes")
            digest.update(piece)
            with explained(Path(gettempdir())):
                file.write(piece)
                file.flush()
    return digest.hexdigest()
