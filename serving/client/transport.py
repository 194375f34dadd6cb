"""HTTP transport of the client: sends requests, retries them and reads the responses."""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel

from serving.client.messages import (
    BUSY,
    RejectedError,
    error_of,
    is_retryable,
    read_response,
    retry_after,
)


def _authorization(token: str | None) -> dict[str, str]:
    """Return the header with the token. Surrounding whitespace is stripped, because token files end
    with a newline. Error messages must not contain the token."""
    if token is None:
        return {}
    token = token.strip()
    if not token or not all("!" <= letter <= "~" for letter in token):
        raise ValueError("the token must be a single word of printable ASCII characters")
    return {"Authorization": f"Bearer {token}"}


def _checked(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
        parsed.raw_host.decode("ascii").encode("idna")  # as DNS lookups do
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"{url} is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url} is not the URL of a server: use http://HOST or https://HOST")
    return parsed


_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0

Body = TypeVar("Body", bound=BaseModel)


class Transport:
    """A connection pool for the server at `url`. Retries transient errors for `retry_seconds`."""

    def __init__(self, url: str, token: str | None, timeout: float, retry_seconds: float) -> None:
        self.url, self.retry_seconds, self._has_responded = url.rstrip("/"), retry_seconds, False
        self._http = httpx.Client(
            base_url=_checked(self.url), headers=_authorization(token), timeout=timeout
        )

    def close(self) -> None:
        self._http.close()

    def request(self, kind: type[Body], method: str, path: str, **request: Any) -> Body:
        """Send an idempotent request, with retries, and return the parsed response.

        Raises RejectedError for an error response or a response that is not from kway.
        """
        response = self._retried(lambda: self._response(method, path, **request))
        if response.is_success:
            with suppress(ValueError):
                return kind.model_validate_json(response.content)
        code, reason = error_of(response)
        raise RejectedError(self.url, response.status_code, code, reason)

    def _response(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            response = self._http.send(
                self._http.build_request(method, path, **request), stream=True
            )
        except httpx.LocalProtocolError:
            # The original error may quote a header that contains the token.
            raise ValueError(f"invalid HTTP request to {self.url}: check the URL") from None
        return read_response(response, self.url)

    def _retried(self, attempt: Callable[[], httpx.Response]) -> httpx.Response:
        """Call `attempt`, with backoff, until it returns a final response or `retry_seconds` have
        passed."""
        began, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        while True:
            try:
                response = attempt()
                self._has_responded = True
                if not is_retryable(response):
                    return response
                requested, failure = retry_after(response), self._busy(response, began)
            except httpx.RequestError as error:
                requested, failure = 0.0, self._unreachable(_error_text(error))
                if isinstance(error, httpx.ConnectError) and not self._has_responded:
                    # Fail immediately: the URL is probably wrong.
                    raise OSError(failure) from error
            # Add random jitter, so that rejected clients do not all retry at the same time.
            wait = max(requested, pause * random.uniform(0.5, 1.0))
            if time.monotonic() + wait > began + self.retry_seconds:
                raise OSError(failure)
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _busy(self, response: httpx.Response, began: float) -> str:
        message = error_of(response)[1]
        if response.status_code not in BUSY:
            return self._unreachable(message)
        return f"{self.url} was busy for {time.monotonic() - began:.1f} s: {message}"

    def _unreachable(self, reason: str) -> str:
        return f"no response from {self.url} ({reason}): is `kway serve` running there?"


def _error_text(error: httpx.RequestError) -> str:
    return str(error) or type(error).__name__
