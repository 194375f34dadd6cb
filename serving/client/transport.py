"""Requests to one server: sending, retrying and reading responses."""

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
    RefusedError,
    error_of,
    is_retryable,
    read_whole,
    retry_after,
)
from serving.client.ndjson import FINAL_EVENTS, fatal_error, split_lines

# An empty line keeps a stream open when there is nothing to send.
_KEEP_ALIVE, _SILENCE_SECONDS = b"\n", 5.0


def open_clients(url: str, token: str | None, timeout: float) -> tuple[httpx.Client, httpx.Client]:
    """Create the HTTP clients, without sending anything. Raises ValueError for an invalid URL or
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
    """The header with the token. Strips it, because token files end with a newline. Errors must not
    show it."""
    if token is None:
        return {}
    token = token.strip()
    if not token or not all("!" <= letter <= "~" for letter in token):
        raise ValueError("token is no single word of ASCII letters, digits and signs: give one")
    return {"Authorization": f"Bearer {token}"}


def _checked(url: str) -> httpx.URL:
    try:
        found = httpx.URL(url)
        found.raw_host.decode("ascii").encode("idna")  # as every look-up of the name does
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"{url} is no URL: {error}") from error
    if found.scheme not in ("http", "https") or not found.host:
        raise ValueError(f"{url} is no URL of a server: it is http://HOST or https://HOST")
    return found


_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0

Body = TypeVar("Body", bound=BaseModel)
Event = TypeVar("Event")


class Transport:
    """The server at `url`. Requests are not retried any more after `patience` seconds."""

    def __init__(self, url: str, token: str | None, timeout: float, patience: float) -> None:
        self.url, self.patience, self._has_answered = url.rstrip("/"), patience, False
        self._http, self._duplex = open_clients(self.url, token, timeout)

    def close(self) -> None:
        self._http.close()
        self._duplex.close()

    def request(self, kind: type[Body], method: str, path: str, **request: Any) -> Body:
        """The response to an idempotent request, which is retried on transient errors."""
        return self.read(self._retried(lambda: self._response(method, path, **request)), kind)

    def request_once(self, method: str, path: str, **request: Any) -> httpx.Response:
        """The response to a request that changes something and is therefore sent only once.

        Raises RefusedError. Raises OSError if it is unknown whether the change was made.
        """
        try:
            answer = self._response(method, path, **request)
        except httpx.RequestError as error:
            raise OSError(
                f"no answer from {self.url} ({_error_text(error)}), and it is not asked again, for "
                "it may have been done: look before you do"
            ) from error
        if not answer.is_success:
            raise self._refused(answer)
        return answer

    def read(self, answer: httpx.Response, kind: type[Body]) -> Body:
        """Parse the body of a response. Raises RefusedError for an error, or if it is not from
        kway."""
        if answer.is_success:
            with suppress(ValueError):
                return kind.model_validate_json(answer.content)
        raise self._refused(answer)

    def stream_events(
        self, kind: TypeAdapter[Event], method: str, path: str, **request: Any
    ) -> Generator[Event, None, None]:
        """Yield the lines of a response as they arrive, up to the final event. A body in `content`
        is sent meanwhile.

        Raises RefusedError, and ConnectionError if the response has no final event.
        """
        reason = "it closed the connection"
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
            f"{self.url} was lost ({reason}): what it had answered is right, and not all"
        )

    def _response(self, method: str, path: str, **request: Any) -> httpx.Response:
        return read_whole(self._send(self._http, method, path, **request), self.url)

    def _send(self, http: httpx.Client, method: str, path: str, **request: Any) -> httpx.Response:
        """A response whose body has not been read."""
        try:
            return http.send(http.build_request(method, path, **request), stream=True)
        except httpx.LocalProtocolError:
            # The original error may quote a header that contains the token.
            raise ValueError(f"what {self.url} is asked is no HTTP: look at the URL") from None

    @contextmanager
    def _open_lines(self, method: str, path: str, **request: Any) -> Iterator[Iterator[bytes]]:
        http = self._duplex if "content" in request else self._http

        def attempt() -> httpx.Response:
            answer = self._send(http, method, path, **request)
            return answer if answer.status_code == 200 else read_whole(answer, self.url)

        answer = self._retried(attempt)
        try:
            if answer.status_code != 200:
                raise self._refused(answer)
            yield split_lines(answer.iter_bytes())
        finally:
            answer.close()

    def _retried(self, attempt: Callable[[], httpx.Response]) -> httpx.Response:
        """The first final response; retries transient errors for up to `patience` seconds."""
        began, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        while True:
            try:
                answer = attempt()
                self._has_answered = True
                if not is_retryable(answer):
                    return answer
                asked_for, failure = retry_after(answer), self._busy(answer, began)
            except httpx.RequestError as error:
                asked_for, failure = 0.0, self._unreachable(_error_text(error))
                if isinstance(error, httpx.ConnectError) and not self._has_answered:
                    # nothing listens there, and nothing has so far
                    raise OSError(failure) from error
            # Random jitter, so that rejected clients do not all retry at the same time.
            wait = max(asked_for, pause * random.uniform(0.5, 1.0))
            if time.monotonic() + wait > began + self.patience:
                raise OSError(failure)
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _busy(self, answer: httpx.Response, began: float) -> str:
        words = error_of(answer)[1]
        if answer.status_code not in BUSY:
            return self._unreachable(words)
        return f"{self.url} was busy for {time.monotonic() - began:.1f} s: {words}"

    def _unreachable(self, words: str) -> str:
        return f"no answer from {self.url} ({words}): is `kway serve` running there?"

    def _parse_event(self, line: bytes, kind: TypeAdapter[Event]) -> Event:
        try:
            event = kind.validate_json(line)
        except ValueError as error:
            raise RefusedError(self.url, 200, "", NOT_KWAY.format(200)) from error
        if (end := fatal_error(event)) is not None:
            raise RefusedError(self.url, 200, end.code, end.message)
        return event

    def _refused(self, answer: httpx.Response) -> RefusedError:
        code, reason = error_of(answer)
        return RefusedError(self.url, answer.status_code, code, reason)


def _error_text(error: httpx.RequestError) -> str:
    return str(error) or type(error).__name__
