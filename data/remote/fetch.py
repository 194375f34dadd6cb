"""Fetches a file from a URL: bounded, checked as it comes in, tried again where that may help."""

import hashlib
from collections.abc import Callable
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import IO

from data.remote.stream import REMEDY, pieces
from data.retry import TransientError, wait_before_retry

_WRONG_TWICE = 2


class _WrongContentError(ValueError):
    """Something else came than was asked for; the message says what."""


class _ShortContentError(_WrongContentError):
    """It ended early: a connection that was cut, as a rule."""


def fetch(
    url: str,
    file: IO[bytes],
    *,
    attempts: int,
    max_bytes: int,
    exact: bool = False,
    sha256: str | None = None,
    check: Callable[[Path], object] | None = None,
) -> None:
    """Write the file at `url` into `file`, from its start.

    exact: it has `max_bytes`, not up to them; sha256: its digest; check: raises ValueError for a
    wrong file at the path of `file`. What may go away by itself is asked for up to `attempts`
    times, a wrong content twice. Errors of writing are the caller's.

    Raises FileNotFoundError, PermissionError and RetriesExhaustedError that name the URL, and
    ValueError if the file there is not the requested one.
    """
    for attempt in range(1, attempts + 1):
        try:
            _fetch_once(url, file, max_bytes, exact, sha256)
            if check is not None:
                _checked(check, file)
            return
        except _WrongContentError as error:
            cut = isinstance(error, _ShortContentError)
            if attempt == attempts or (attempt >= _WRONG_TWICE and not cut):
                raise ValueError(
                    f"{url} is not the file that the manifest means ({error}): copy it there "
                    "again, or make the manifest of what is there"
                ) from error
            failure = TransientError(str(error))
        except TransientError as error:
            failure = error
        wait_before_retry(url, failure, attempt, attempts=attempts, remedy=REMEDY)


def fetch_bytes(url: str, *, attempts: int, max_bytes: int) -> bytes:
    """The content of a small file at `url`; raises as `fetch`."""
    content = BytesIO()
    fetch(url, content, attempts=attempts, max_bytes=max_bytes)
    return content.getvalue()


def _fetch_once(url: str, file: IO[bytes], max_bytes: int, exact: bool, sha256: str | None) -> None:
    file.seek(0)
    digest, received = hashlib.sha256(), 0
    with closing(pieces(url)) as stream:
        for piece in stream:
            received += len(piece)
            if received > max_bytes:
                raise _WrongContentError(f"it has more than {max_bytes} bytes")
            digest.update(piece)
            file.write(piece)
    if exact and received < max_bytes:
        raise _ShortContentError(f"{received} of {max_bytes} bytes came")
    if sha256 is not None and digest.hexdigest() != sha256:
        raise _WrongContentError("its SHA-256 is another")
    file.truncate()


def _checked(check: Callable[[Path], object], file: IO[bytes]) -> None:
    file.flush()
    try:
        check(Path(file.name))
    except ValueError as error:
        raise _WrongContentError(str(error)) from error
