"""Requests to one server: which are sent again, and what their answers mean."""

import random
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter

from serving.client.duplex import Duplex
from serving.client.lines import LAST, end_of, split_lines

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
_TRY_AGAIN = (429, 502, 503, 504)
# An empty line keeps a stream open that has nothing to send.
_SIGN_OF_LIFE, _SILENCE_SECONDS = b"\n", 5.0
_NOT_OURS = "status {}, and no JSON of kway's: is it a kway server?"

Body = TypeVar("Body", bound=BaseModel)
Said = TypeVar("Said")


class RefusedError(ValueError):
    """The server refuses: its status, its code for programs, and its words.

    The status is 200 where it had begun to answer: the code says why it ends.
    """

    def __init__(self, url: str, status: int, code: str, reason: str) -> None:
        super().__init__(f"{url} refuses: {reason}")
        self.status, self.code = status, code


class Asking:
    """The server at `url`; `patience` is how many seconds one request is tried."""

    def __init__(self, url: str, token: str | None, timeout: float, patience: float) -> None:
        self.url, self._patience, self._was_there = url.rstrip("/"), patience, False
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise ValueError(f"{url} is no URL: {error}") from error
        if self._http.base_url.scheme not in ("http", "https"):
            raise ValueError(f"{url} is no URL of a server: it begins with http:// or https://")
        self._duplex = httpx.Client(
            transport=Duplex(sign_of_life=_SIGN_OF_LIFE, silence_seconds=_SILENCE_SECONDS),
            base_url=self.url,
            headers=headers | {"Accept-Encoding": "identity", "Connection": "close"},
            timeout=timeout,
        )

    def close(self) -> None:
        self._http.close()
        self._duplex.close()

    def ask(self, kind: type[Body], method: str, path: str, **request: Any) -> Body:
        """The answer to what changes nothing, asked again while that may help."""
        return self.read(self._again(lambda: self._http.request(method, path, **request)), kind)

    def tell(self, method: str, path: str, **request: Any) -> httpx.Response:
        """The answer to what changes something, and so is sent once.

        Raises RefusedError, and OSError where it is not known whether it was done.
        """
        try:
            answer = self._http.request(method, path, **request)
        except httpx.TransportError as error:
            raise OSError(
                f"no answer from {self.url} ({_words(error)}), and it is not asked again, for it "
                "may have been done: look before you do"
            ) from error
        if not answer.is_success:
            raise self._refusal(answer)
        return answer

    def read(self, answer: httpx.Response, kind: type[Body]) -> Body:
        """The body of an answer; RefusedError where it is none, or none of kway's."""
        if answer.is_success:
            with suppress(ValueError):
                return kind.model_validate_json(answer.content)
        raise self._refusal(answer)

    def converse(
        self, kind: TypeAdapter[Said], method: str, path: str, **request: Any
    ) -> Generator[Said, None, None]:
        """The lines of an answer as they come, through the last one; with `content` a body is sent
        meanwhile.

        Raises RefusedError, and ConnectionError where the answer has no last line.
        """
        reason = "it closed the connection"
        try:
            with self._opened(method, path, **request) as lines:
                for line in lines:
                    said = self._understood(line, kind)
                    yield said
                    if isinstance(said, LAST):
                        return
        except httpx.TransportError as error:
            reason = _words(error)
        raise ConnectionError(
            f"{self.url} was lost ({reason}): what it had answered is right, and not all"
        )

    @contextmanager
    def _opened(self, method: str, path: str, **request: Any) -> Iterator[Iterator[bytes]]:
        http = self._duplex if "content" in request else self._http

        def attempt() -> httpx.Response:
            answer = http.send(http.build_request(method, path, **request), stream=True)
            if answer.status_code != 200:
                with closing(answer):
                    answer.read()
            return answer

        with closing(self._again(attempt)) as answer:
            if answer.status_code != 200:
                raise self._refusal(answer)
            yield split_lines(answer.iter_bytes())

    def _again(self, attempt: Callable[[], httpx.Response]) -> httpx.Response:
        """An answer that is final, asking again while that may help and the patience lasts."""
        deadline, pause = time.monotonic() + self._patience, _FIRST_PAUSE_SECONDS
        while True:
            try:
                answer = attempt()
                self._was_there = True
                if not _may_help_again(answer):
                    return answer
                reason, wanted = _reason(answer)[1], _retry_after(answer)
            except httpx.TransportError as error:
                reason, wanted = _words(error), 0.0
                if isinstance(error, httpx.ConnectError) and not self._was_there:
                    deadline = 0.0  # nobody listens there, and nobody did
            # Not in step with everybody else who was sent away.
            wait = max(wanted, pause * random.uniform(0.5, 1.0))
            if time.monotonic() + wait > deadline:
                raise OSError(
                    f"no answer from {self.url} ({reason}): is `kway serve` running there?"
                )
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _understood(self, line: bytes, kind: TypeAdapter[Said]) -> Said:
        try:
            said = kind.validate_json(line)
        except ValueError as error:
            raise RefusedError(self.url, 200, "", _NOT_OURS.format(200)) from error
        if (end := end_of(said)) is not None:
            raise RefusedError(self.url, 200, end.code, end.message)
        return said

    def _refusal(self, answer: httpx.Response) -> RefusedError:
        code, reason = _reason(answer)
        return RefusedError(self.url, answer.status_code, code, reason)


def _words(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__


def _may_help_again(answer: httpx.Response) -> bool:
    """Busy, or a proxy's word about a replica that died; what kway itself says is final."""
    if answer.status_code in _TRY_AGAIN:
        return True
    return answer.status_code == 500 and _reason(answer)[0] == ""


def _reason(answer: httpx.Response) -> tuple[str, str]:
    """The code, "" where the answer is not kway's, and the words of a refusal."""
    try:
        error = answer.json()["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return "", _NOT_OURS.format(answer.status_code)


def _retry_after(answer: httpx.Response) -> float:
    stated = answer.headers.get("Retry-After", "")
    return min(float(stated), _LONGEST_PAUSE_SECONDS) if stated.isdecimal() else 0.0
