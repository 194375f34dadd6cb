"""HTTP transport of the client: sends requests, retries them and reads the responses."""

import random
import time
from contextlib import suppress
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel

from serving.schemas import ErrorBody

_BUSY = (429, 503)
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
_HINT = "is it a kway server?"

Body = TypeVar("Body", bound=BaseModel)


class RejectedError(ValueError):
    """The server rejected a request. `status` is the HTTP status, `code` is machine-readable, and
    `reason` is the message.
    """

    def __init__(self, url: str, status: int, code: str, reason: str) -> None:
        super().__init__(f"{url} rejected the request: {reason}")
        self.status, self.code, self.reason = status, code, reason


class Transport:
    """A connection pool for the server at `url`. Retries transient errors for `retry_seconds`."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 60,
        retry_seconds: float = 60,
    ) -> None:
        """Raises ValueError for an invalid URL or token. Does not connect yet."""
        self.url, self.retry_seconds, self._has_responded = url.rstrip("/"), retry_seconds, False
        headers = _authorization(token)
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise ValueError(f"{url} is not a URL: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def request(self, kind: type[Body], method: str, path: str, **request: Any) -> Body:
        """Send an idempotent request and return the parsed response. Retry it, with backoff, until
        there is a final response or `retry_seconds` have passed.

        Raises RejectedError for an error response or a response that is not from kway, and OSError
        if there is no final response.
        """
        began, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        while True:
            requested = 0.0
            try:
                response = self._http.request(method, path, **request)
            except httpx.LocalProtocolError:
                # The original error may quote a header that contains the token.
                raise ValueError(f"invalid HTTP request to {self.url}: check the URL") from None
            except httpx.RequestError as error:
                failure = self._unreachable(str(error) or type(error).__name__)
                is_wrong = isinstance(error, (httpx.ConnectError, httpx.UnsupportedProtocol))
                if is_wrong and not self._has_responded:
                    # Fail immediately: the URL is probably wrong.
                    raise OSError(failure) from error
            else:
                self._has_responded, status = True, response.status_code
                if response.is_success:
                    with suppress(ValueError):
                        return kind.model_validate_json(response.content)
                code, reason = _error_of(status, response.content)
                # A proxy reports that a replica died (500), or that none was available in time
                # (408). Any other error from kway itself is final.
                is_of_proxy = status in (502, 504) or (status in (408, 500) and code == "")
                if status not in _BUSY and not is_of_proxy:
                    raise RejectedError(self.url, status, code, reason)
                requested = _seconds(response.headers.get("Retry-After", ""))
                failure = self._unreachable(reason)
                if status in _BUSY:
                    seconds = time.monotonic() - began
                    failure = f"{self.url} was busy for {seconds:.1f} s: {reason}"
            # Add random jitter, so that rejected clients do not all retry at the same time.
            wait = max(requested, pause * random.uniform(0.5, 1.0))
            if time.monotonic() + wait > began + self.retry_seconds:
                raise OSError(failure)
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _unreachable(self, reason: str) -> str:
        return f"no response from {self.url} ({reason}): is `kway serve` running there?"


def _error_of(status: int, body: bytes) -> tuple[str, str]:
    """Return the code and the message of an error response. The code is "" if the response is not
    from kway."""
    try:
        error = ErrorBody.model_validate_json(body).error
    except ValueError:
        return "", f"unexpected response with status {status}: {_HINT}"
    return error.code, error.message


def _seconds(retry_after: str) -> float:
    """Return the delay that the server requests, at most 5 seconds."""
    # Convert only the first 9 digits: Python rejects numbers with thousands of digits.
    is_number = retry_after.isascii() and retry_after.isdecimal()
    return min(float(retry_after[:9]), _LONGEST_PAUSE_SECONDS) if is_number else 0.0


def _authorization(token: str | None) -> dict[str, str]:
    """Return the header with the token. Surrounding whitespace is stripped, because token files end
    with a newline. Error messages must not contain the token."""
    if token is None:
        return {}
    token = token.strip()
    if not token or not all("!" <= letter <= "~" for letter in token):
        raise ValueError("the token must be a single word of printable ASCII characters")
    return {"Authorization": f"Bearer {token}"}
