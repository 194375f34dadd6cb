"""Fetches a file from a URL through fsspec.

The size is bounded, content is verified during the download, transient failures are retried, and
all backends raise the same errors.
"""

import hashlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeVar

from data.extras import install_command
from data.messages import SHARD_AGAIN
from data.retry import ATTEMPTS, DEFAULT_REMEDY, TransientError, wait_before_retry

REMEDY = (
    "check the network and the server, and run the same command again, or raise data.cache.attempts"
)

Parsed = TypeVar("Parsed")

_PIECE = 1 << 20
_RANGE = 1 << 23  # bytes per request, for backends that read by ranges
_SILENCE_SECONDS = 60
_PARTIAL_CONTENT = 206
_TRANSIENT_STATUS = (408, 425, 429)
# An exception that is not an OSError is a network error if it comes from one of these packages;
# otherwise, it is a bug.
_BACKENDS = ("aiohttp", "aiobotocore", "botocore", "fsspec", "gcsfs", "google", "requests", "s3fs")
_WRONG_TWICE = 2


def pieces(url: str, start: int = 0) -> Generator[bytes, None, None]:
    """Yield the content of the file at `url`, starting at byte `start`, in pieces.

    Raises TransientError, with only the reason, for timeouts, 5xx statuses and broken connections;
    FileNotFoundError and PermissionError, with the URL; and ValueError if the package for this kind
    of URL is missing.
    """
    with explained(url), _open(url, start) as stream:
        while piece := stream.read(_PIECE):
            yield piece


def resumed(
    address: str,
    *,
    opened: Callable[[str, int], Generator[bytes, None, None]] = pieces,
    attempts: int = ATTEMPTS,
    remedy: str = DEFAULT_REMEDY,
) -> Iterator[bytes]:
    """Yield the content of a file. After a transient error, reading resumes where it stopped.

    The number of attempts is reset whenever a piece is received. opened: a function that yields the
    pieces of `address` from a byte on.
    """
    received, attempt = 0, 1
    while True:
        try:
            with closing(opened(address, received)) as stream:
                for piece in stream:
                    received, attempt = received + len(piece), 1
                    yield piece
            return
        except OSError as error:
            where = f"{address} at byte {received:,}"
            wait_before_retry(where, error, attempt, attempts=attempts, remedy=remedy)
            attempt += 1


def _open(url: str, start: int) -> IO[bytes]:
    if url.startswith(("http://", "https://")):
        files = file_system(url)
        # With a size and block_size=0, fsspec sends a single GET request and no HEAD request before
        # it. The range starts one byte early, because servers reject a range that begins at the end
        # of the file.
        options = {"headers": {"Range": f"bytes={start - 1}-"}} if start else {}
        stream: Any = files.open(url, "rb", block_size=0, size=1, **options)
        if start:
            _skip(stream, 1 if stream.r.status == _PARTIAL_CONTENT else start)
    else:
        files = file_system(url)
        stream = files.open(url, "rb", cache_type="readahead", block_size=_RANGE)
        stream.seek(start)
    return stream


def file_system(url: str, **options: Any) -> Any:
    """Return fsspec's file system for `url`.

    Call this for each operation, because fsspec caches one instance per process, which does not
    survive a fork. Raises ValueError if the package for this kind of URL is missing.
    """
    import fsspec

    if url.startswith(("http://", "https://")):
        options["get_client"] = _client
    try:
        return fsspec.filesystem(url.partition("://")[0], **options)
    except ImportError as error:
        raise ValueError(f"{url}: {error}: run {install_command('remote')}") from error


def _skip(stream: IO[bytes], count: int) -> None:
    while count and (piece := stream.read(min(_PIECE, count))):
        count -= len(piece)


async def _client(**settings: Any) -> Any:
    """Create an HTTP session for fsspec.

    It limits idle time, not the total duration, and rejects redirects from https to http.
    """
    import aiohttp

    silence = aiohttp.ClientTimeout(
        total=None, sock_connect=_SILENCE_SECONDS, sock_read=_SILENCE_SECONDS
    )
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_check_redirect)
    own = {"timeout": silence, "read_bufsize": _PIECE, "trace_configs": [trace]}
    return aiohttp.ClientSession(**{**own, **settings})


async def _check_redirect(session: Any, context: Any, request: Any) -> None:
    """Accept redirects to any host, but not from https to another scheme."""
    target = request.response.headers.get("Location", "")
    scheme = target.partition("://")[0].lower() if "://" in target else request.url.scheme
    if scheme not in (request.url.scheme, "https"):
        raise PermissionError(f"it redirects from {request.url.scheme}:// to {target}")


@contextmanager
def explained(url: str, operation: str = "read") -> Iterator[None]:
    """Map the errors of each backend to transient and permanent errors.

    operation: what is done with the file, as a participle: `read` or `written`.
    """
    try:
        yield
    except FileNotFoundError as error:
        if operation != "read":
            raise FileNotFoundError(
                f"{url} cannot be {operation} ({_reason(error)}): create it, or change the URL"
            ) from error
        raise FileNotFoundError(
            f"{url} does not exist: check data.shards, or copy the file there"
        ) from error
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise _denied(url, error, operation) from error
    except (OSError, TimeoutError) as error:
        raise _of_status(url, error, operation) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _BACKENDS:
            raise
        raise _of_status(url, error, operation) from error


def _of_status(url: str, error: Exception, operation: str) -> OSError:
    """Classify an error by its HTTP status, if it has a status. gcsfs stores the status as text."""
    kind = type(error).__name__
    if kind == "TooManyRedirects" or "Credential" in kind:
        return _denied(url, error, operation)
    code = str(getattr(error, "status", None) or getattr(error, "code", None))
    status = int(code) if code.isdecimal() else None
    if status and 400 <= status < 500 and status not in _TRANSIENT_STATUS:
        return _denied(url, error, operation)
    return TransientError(_reason(error))


def _denied(url: str, error: Exception, operation: str) -> PermissionError:
    return PermissionError(
        f"{url} cannot be {operation} ({_reason(error)}): check the URL and your credentials"
    )


def _reason(error: Exception) -> str:
    """Return the reason for an error in one short line. Many network errors have no message."""
    if type(error).__name__ == "TooManyRedirects":
        return "too many redirects"
    status, message = getattr(error, "status", None), getattr(error, "message", "")
    if status and message:
        return f"{status} {message}"
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


class _WrongContentError(ValueError):
    """The received content is not the requested file. The message gives the reason."""


class _ShortContentError(_WrongContentError):
    """The content ended early, usually because of a broken connection."""


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
    """Write the content at `url` to `file`, from the beginning.

    exact: whether the size must be exactly `max_bytes`; otherwise, `max_bytes` is an upper limit.
    sha256: the expected digest. check: a function that receives the path of `file` and raises
    ValueError if the content is wrong. The download is attempted up to `attempts` times for
    transient failures, and twice for wrong content. Errors that occur when writing to `file` are
    not handled here.

    Raises FileNotFoundError, PermissionError or RetriesExhaustedError, with the URL, and ValueError
    if the file at the URL is not the requested one.
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
                    f"{url} does not match the manifest ({error}): upload the file again, or "
                    f"{SHARD_AGAIN}"
                ) from error
            failure = TransientError(str(error))
        except TransientError as error:
            failure = error
        wait_before_retry(url, failure, attempt, attempts=attempts, remedy=REMEDY)


def fetch_parsed(
    url: str, parse: Callable[[bytes], Parsed], *, attempts: int, max_bytes: int
) -> Parsed:
    """Return the parsed content of a small file at `url`.

    The file is fetched again if `parse` raises ValueError. Raises the errors of `fetch` and, after
    the second wrong content, that of `parse`.
    """
    content = BytesIO()
    for attempt in range(1, _WRONG_TWICE + 1):
        fetch(url, content, attempts=attempts, max_bytes=max_bytes)
        try:
            return parse(content.getvalue())
        except ValueError as error:
            if attempt == min(attempts, _WRONG_TWICE):
                raise
            failure = TransientError(str(error))
        wait_before_retry(url, failure, attempt, attempts=attempts, remedy=REMEDY)
    raise AssertionError


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
        raise _ShortContentError(f"received {received} of {max_bytes} bytes")
    if sha256 is not None and digest.hexdigest() != sha256:
        raise _WrongContentError("its SHA-256 differs")
    file.truncate()


def _checked(check: Callable[[Path], object], file: IO[bytes]) -> None:
    file.flush()
    try:
        check(Path(file.name))
    except ValueError as error:
        raise _WrongContentError(str(error)) from error
