"""HTTP transport of the client: sends requests, retries them and reads the responses."""

import random
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter

from serving.client.duplex import Duplex
from serving.client.messages import (
    BUSY,
    NOT_KWAY,
    RejectedError,
    error_of,
    is_retryable,
    path_of,
    read_response,
    retry_after,
)
from serving.client.ndjson import FINAL_EVENTS, fatal_error, split_lines

# An empty line keeps a stream open while there is nothing to send.
_KEEP_ALIVE, _SILENCE_SECONDS = b"\n", 5.0


def open_clients(url: str, token: str | None, timeout: float) -> tuple[httpx.Client, httpx.Client]:
    """Create the HTTP clients. Nothing is sent yet. Raises ValueError for an invalid URL or
    token."""
    headers = _authorization(token)
    base = _checked(url)
    return httpx.Client(base_url=base, headers=headers, timeout=timeout), httpx.Client(
        transport=Duplex(keep_alive=_KEEP_ALIVE, silence_seconds=_SILENCE_SECONDS),
        base_url=base,
        headers=headers | {"Accept-Encoding": "identity", "Connection": "close"},
        timeout=timeout,
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


# Paths that do not belong to a model.
_OF_SERVER = ("/v1/models", "/v1/admin")
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0

Body = TypeVar("Body", bound=BaseModel)
Event = TypeVar("Event")


class Transport:
    """A connection pool for the server at `url`. Retries transient errors for `retry_seconds`.
    Requests are sent to the model `model`, by default the default model of the server."""

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout: float,
        retry_seconds: float,
        model: str | None = None,
    ) -> None:
        self.url, self.retry_seconds, self._has_responded = url.rstrip("/"), retry_seconds, False
        self._model_path = "/v1" if model is None else path_of("models", model)
        self._http, self._duplex = open_clients(self.url, token, timeout)

    def close(self) -> None:
        self._http.close()
        self._duplex.close()

    def request(self, kind: type[Body], method: str, path: str, **request: Any) -> Body:
        """Send an idempotent request, with retries, and return the parsed response."""
        return self.read(self._retried(lambda: self._response(method, path, **request)), kind)

    def request_once(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request that changes something. It is not retried.

        Raises RejectedError. Raises OSError if it is unknown whether the change was made.
        """
        try:
            response = self._response(method, path, **request)
        except httpx.RequestError as error:
            raise OSError(
                f"no response from {self.url} ({_error_text(error)}): the change may have been "
                "made; check before you retry"
            ) from error
        if not response.is_success:
            raise self._error(response)
        return response

    def read(self, response: httpx.Response, kind: type[Body]) -> Body:
        """Parse the body of a response. Raises RejectedError for an error response or a response
        that is not from kway."""
        if response.is_success:
            with suppress(ValueError):
                return kind.model_validate_json(response.content)
        raise self._error(response)

    def stream_events(
        self, kind: TypeAdapter[Event], method: str, path: str, **request: Any
    ) -> Generator[Event, None, None]:
        """Yield the events of a response as they arrive, up to the final one. A body in `content`
        is sent concurrently.

        Raises RejectedError, and ConnectionError if the response ends without a final event.
        """
        reason = "closed by the server"
        try:
            with self._open_lines(method, path, **request) as lines:
                for line in lines:
                    event = self._parse_event(line, kind)
                    yield event
                    if isinstance(event, FINAL_EVENTS):
                        return
        except httpx.RequestError as error:
            reason = _error_text(error)
        raise ConnectionError(
            f"lost the connection to {self.url} ({reason}): the events received so far are valid, "
            "but later ones are missing"
        )

    def _response(self, method: str, path: str, **request: Any) -> httpx.Response:
        return read_response(self._send(self._http, method, path, **request), self.url)

    def _send(self, http: httpx.Client, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request. The body of the response is not read yet."""
        if not path.startswith(_OF_SERVER):
            path = self._model_path + path.removeprefix("/v1")
        try:
            return http.send(http.build_request(method, path, **request), stream=True)
        except httpx.LocalProtocolError:
            # The original error may quote a header that contains the token.
            raise ValueError(f"invalid HTTP request to {self.url}: check the URL") from None

    @contextmanager
    def _open_lines(self, method: str, path: str, **request: Any) -> Iterator[Iterator[bytes]]:
        http = self._duplex if "content" in request else self._http

        def attempt() -> httpx.Response:
            response = self._send(http, method, path, **request)
            return response if response.status_code == 200 else read_response(response, self.url)

        response = self._retried(attempt)
        try:
            if response.status_code != 200:
                raise self._error(response)
            yield split_lines(response.iter_bytes())
        finally:
            response.close()

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

    def _parse_event(self, line: bytes, kind: TypeAdapter[Event]) -> Event:
        try:
            event = kind.validate_json(line)
        except ValueError as error:
            raise RejectedError(self.url, 200, "", NOT_KWAY.format(200)) from error
        if (end := fatal_error(event)) is not None:
            raise RejectedError(self.url, 200, end.code, end.message)
        return event

    def _error(self, response: httpx.Response) -> RejectedError:
        code, reason = error_of(response)
        return RejectedError(self.url, response.status_code, code, reason)


def _error_text(error: httpx.RequestError) -> str:
    return str(error) or type(error).__name__
