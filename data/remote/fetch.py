"""Fetches a file from a URL: bounded, checked as it comes in, tried again where that may help."""

import hashlib
import logging
import random
import time
from collections.abc import Callable
from contextlib import closing
from io import BytesIO
from pathlib import Path
from threading import main_thread
from typing import IO

from data.remote.stream import TransientError, pieces

_log = logging.getLogger("kway.data")

_FIRST_SECONDS = 0.2
_LONGEST_SECONDS = 20.0
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

    Raises FileNotFoundError, PermissionError and OSError that name the URL, ValueError where the
    file there is not the one that was asked for.
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
            reason = str(error)
        except TransientError as error:
            # A process that ends closes its connections under its background threads.
            if attempt == attempts or not main_thread().is_alive():
                raise OSError(
                    f"{url} cannot be fetched ({error}; {attempts} attempts): check the network "
                    "and the server and run the same again, or raise data.cache.attempts"
                ) from error
            reason = str(error)
        pause(url, reason, attempt, attempts)


def pause(url: str, reason: str, attempt: int, attempts: int) -> None:
    """Wait after a failed attempt, longer after each and shortened at random; a line in the log."""
    longest = min(_FIRST_SECONDS * 2 ** (attempt - 1), _LONGEST_SECONDS)
    wait = longest * random.SystemRandom().uniform(0.5, 1)
    _log.warning("%s: %s; attempt %d of %d in %.1f s", url, reason, attempt + 1, attempts, wait)
    time.sleep(wait)


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
