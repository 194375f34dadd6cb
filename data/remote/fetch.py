"""Fetches a file from a URL through fsspec.

The size is bounded, content is verified during the download, transient failures are retried, and
all backends raise the same errors.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeVar

from data.extras import install_command
from data.messages import SHARD_AGAIN
from data.remote.config import file_url
from data.retry import TransientError, retried, wait_before_retry

Answer = TypeVar("Answer")

REMEDY = (
    "check the network and the server, and run the same command again, or raise data.cache.attempts"
)

_PIECE = 1 << 20
_RANGE = 1 << 23  # bytes per request, for backends that read by ranges
_SILENCE_SECONDS = 60
_TRANSIENT_STATUS = (408, 425, 429)
# An exception that is not an OSError is a network error if it comes from one of these packages;
# otherwise, it is a bug.
_BACKENDS = ("aiohttp", "aiobotocore", "botocore", "fsspec", "gcsfs", "google", "requests", "s3fs")


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
    except Exception as error:
        is_network = isinstance(error, OSError) or (
            type(error).__module__.partition(".")[0] in _BACKENDS
        )
        if not is_network:
            raise
        if _is_denied(error):
            raise PermissionError(
                f"{url} cannot be {operation} ({_reason(error)}): check the URL and your "
                "credentials"
            ) from error
        raise TransientError(_reason(error)) from error


def _is_denied(error: Exception) -> bool:
    """Return whether an error is permanent. gcsfs stores the HTTP status as text."""
    kind = type(error).__name__
    if isinstance(error, PermissionError | IsADirectoryError | NotADirectoryError):
        return True
    if kind == "TooManyRedirects" or "Credential" in kind:
        return True
    code = str(getattr(error, "status", None) or getattr(error, "code", None))
    status = int(code) if code.isdecimal() else 0
    return 400 <= status < 500 and status not in _TRANSIENT_STATUS


def _reason(error: Exception) -> str:
    """Return the reason for an error in one short line. Many network errors have no message."""
    if type(error).__name__ == "TooManyRedirects":
        return "too many redirects"
    status, message = getattr(error, "status", None), getattr(error, "message", "")
    if status and message:
        return f"{status} {message}"
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def fetch(
    url: str,
    file: IO[bytes],
    *,
    attempts: int,
    max_bytes: int,
    sha256: str | None = None,
    parse: Callable[[], Any] = lambda: None,
) -> Any:
    """Write the content at `url` to `file`, from the beginning, and return `parse()`.

    max_bytes: an upper limit of the size. sha256: the expected digest. parse: a function that reads
    `file` and raises ValueError if the content is wrong. The download is attempted up to `attempts`
    times for transient failures, and twice for wrong content. Errors that occur when writing to
    `file` are not handled here.

    Raises FileNotFoundError, PermissionError or RetriesExhaustedError, with the URL, and ValueError
    if the file at the URL is not the requested one.
    """
    file_system(url)  # raises ValueError if a package is missing
    was_wrong = False
    for attempt in range(1, attempts + 1):
        try:
            if (reason := _fetch_once(url, file, max_bytes, sha256)) is not None:
                raise ValueError(
                    f"{url} does not match the manifest ({reason}): upload the file again, or "
                    f"{SHARD_AGAIN}"
                )
            return parse()
        except ValueError as error:
            if was_wrong or attempt == attempts:
                raise
            was_wrong, failure = True, TransientError(str(error))
        except TransientError as error:
            failure = error
        wait_before_retry(url, failure, attempt, attempts=attempts, remedy=REMEDY)


def read_file(
    folder: Path | str,
    name: str,
    parse: Callable[[bytes], Answer],
    *,
    attempts: int,
    max_bytes: int,
) -> Answer:
    """Return `parse(content)` of a file in a folder at a path or URL. Retries after a transient
    error.
    """
    if isinstance(folder, Path):
        path = folder / name
        return parse(retried(str(path), path.read_bytes))
    content = BytesIO()
    found: Answer = fetch(
        file_url(folder, name),
        content,
        attempts=attempts,
        max_bytes=max_bytes,
        parse=lambda: parse(content.getvalue()),
    )
    return found


def _fetch_once(url: str, file: IO[bytes], max_bytes: int, sha256: str | None) -> str | None:
    """Return what is wrong with the content, or None."""
    file.seek(0)
    digest, received = hashlib.sha256(), 0
    for piece in _pieces(url):
        received += len(piece)
        if received > max_bytes:
            return f"it has more than {max_bytes} bytes"
        digest.update(piece)
        file.write(piece)
    file.truncate()  # not before, because the size of the file reserves space in the cache
    file.flush()
    if sha256 is not None and digest.hexdigest() != sha256:
        return f"the SHA-256 of the {received:,} bytes differs"
    return None


def _pieces(url: str) -> Iterator[bytes]:
    """Yield the content of the file at `url` in pieces.

    Raises TransientError, with only the reason, for timeouts, 5xx statuses and broken connections,
    and FileNotFoundError and PermissionError, with the URL.
    """
    # With a size and block_size=0, fsspec sends a single GET request and no HEAD request before it.
    options: dict[str, Any] = {"cache_type": "readahead", "block_size": _RANGE}
    if url.startswith(("http://", "https://")):
        options = {"block_size": 0, "size": 1}
    with explained(url), file_system(url).open(url, "rb", **options) as stream:
        while piece := stream.read(_PIECE):
            yield piece
