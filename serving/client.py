"""Asks a running server from Python: `Client("http://127.0.0.1:8000").query(["husky"], [Path(…)])`.

Free of torch and Ray. What is refused because the server is busy, and what a replica that died left
unanswered, is asked again: a question changes nothing, so each is answered once however often it
was sent.
"""

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import httpx
from pydantic import BaseModel, PositiveInt

from serving.verdicts import Answer

# What a request adds to each of its pictures or texts, generously.
_EXTRA_BYTES = 1000
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
_TRY_AGAIN = (429, 502, 503, 504)

Body = TypeVar("Body", bound=BaseModel)
Input = Path | bytes | str


class Limits(BaseModel):
    """What one request may hold."""

    max_inputs: PositiveInt
    max_text_chars: PositiveInt
    max_body_bytes: PositiveInt


class Served(BaseModel):
    """What a question needs to know of the model that is served."""

    reads: Literal["pictures", "texts"]
    recalls: list[float]
    limits: Limits


class ClassFound(BaseModel):
    id: int
    name: str


class ClassesFound(BaseModel):
    """Some of the `total` classes that a search found."""

    total: int
    classes: list[ClassFound]


class RefusedError(ValueError):
    """The server refuses: its status, its code for programs, and its words."""

    def __init__(self, url: str, status: int, code: str, reason: str) -> None:
        super().__init__(f"{url} refuses: {reason}")
        self.status, self.code = status, code


class Client:
    """A server at `url`. `patience` is how many seconds one request is tried, pauses included.

    Every method raises RefusedError for what the server refuses for good, and OSError where it
    has no answer within the patience. Not for several threads at once.
    """

    def __init__(
        self, url: str, *, token: str | None = None, timeout: float = 60, patience: float = 60
    ) -> None:
        self.url, self._patience, self._was_there = url.rstrip("/"), patience, False
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise ValueError(f"{url} is no URL: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def served(self) -> Served:
        """What the server serves."""
        return self._asked(Served, "GET", "/v1/model")

    def classes(self, search: str = "", *, limit: int = 20, offset: int = 0) -> ClassesFound:
        """Classes whose names contain `search`; those that begin with it first."""
        parameters = {"search": search, "limit": limit, "offset": offset}
        return self._asked(ClassesFound, "GET", "/v1/classes", params=parameters)

    def query(
        self,
        classes: Sequence[str | int],
        inputs: Sequence[Input],
        *,
        recall: float | None = None,
        threshold: float | None = None,
    ) -> Answer:
        """Is each input of these classes? They are names, or numbers; pictures are files or their
        bytes, texts are strings.

        As many requests as the server's limits ask for, one at a time. Raises ValueError for inputs
        of the wrong kind, too, before anything is sent.
        """
        served = self.served()
        self._check(inputs, served)
        named = [f"#{one}" if isinstance(one, int) else one for one in classes]
        fields: dict[str, Any] = {"classes": named}
        numbers = {"recall": recall, "threshold": threshold}
        fields |= {name: value for name, value in numbers.items() if value is not None}
        parts = [
            self._asked(Answer, "POST", "/v1/query", **request)
            for request in _requests(fields, inputs, served.limits)
        ]
        return joined(parts)

    def _check(self, inputs: Sequence[Input], served: Served) -> None:
        if not inputs:
            raise ValueError("there is nothing to ask about: give pictures or texts")
        for place, one in enumerate(inputs):
            if isinstance(one, str) != (served.reads == "texts"):
                remedy = "name picture files" if served.reads == "pictures" else "give texts"
                raise ValueError(f"{self.url} reads {served.reads}: {remedy}")
            if isinstance(one, str) and len(one) > served.limits.max_text_chars:
                raise ValueError(
                    f"texts[{place}] ({one[:60].strip()}…) has {len(one)} characters, and "
                    f"{self.url} takes {served.limits.max_text_chars}: shorten it"
                )

    def _asked(self, kind: type[Body], method: str, path: str, **request: Any) -> Body:
        """The body of the answer, asking again while that may help and the patience lasts."""
        deadline, pause = time.monotonic() + self._patience, _FIRST_PAUSE_SECONDS
        while True:
            try:
                answer = self._http.request(method, path, **request)
                self._was_there = True
                if not _may_help_again(answer):
                    return self._accepted(answer, kind)
                reason, wanted = _reason(answer)[1], _retry_after(answer)
            except httpx.TransportError as error:
                reason, wanted = str(error) or type(error).__name__, 0.0
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

    def _accepted(self, answer: httpx.Response, kind: type[Body]) -> Body:
        if answer.status_code == 200:
            try:
                return kind.model_validate_json(answer.content)
            except ValueError:
                pass  # said below
        code, reason = _reason(answer)
        raise RefusedError(self.url, answer.status_code, code, reason)


def joined(parts: Sequence[Answer]) -> Answer:
    """One answer about all inputs, whose positions count through the parts."""
    results = [result for part in parts for result in part.results]
    numbered = [result.model_copy(update={"input": place}) for place, result in enumerate(results)]
    return parts[0].model_copy(update={"results": numbered})


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
        return "", f"status {answer.status_code}, and no JSON of kway's: is it a kway server?"


def _retry_after(answer: httpx.Response) -> float:
    stated = answer.headers.get("Retry-After", "")
    return min(float(stated), _LONGEST_PAUSE_SECONDS) if stated.isdecimal() else 0.0


def _requests(
    fields: dict[str, Any], inputs: Sequence[Input], limits: Limits
) -> Iterator[dict[str, Any]]:
    """The inputs in requests that the server's limits allow, as httpx sends them, one at a time."""
    held: list[tuple[str, bytes] | str] = []
    size = 0
    for one in inputs:
        part = one if isinstance(one, str) else _file(one)
        added = _EXTRA_BYTES + (len(json.dumps(part)) if isinstance(part, str) else len(part[1]))
        if held and (len(held) == limits.max_inputs or size + added > limits.max_body_bytes):
            yield _request(fields, held)
            held, size = [], 0
        held.append(part)
        size += added
    yield _request(fields, held)


def _file(picture: Path | bytes) -> tuple[str, bytes]:
    if isinstance(picture, bytes):
        return "picture", picture
    return picture.name, picture.read_bytes()


def _request(fields: dict[str, Any], held: Sequence[tuple[str, bytes] | str]) -> dict[str, Any]:
    """Texts go as JSON, pictures as the files of a form."""
    if isinstance(held[0], str):
        content = json.dumps({**fields, "texts": held})
        return {"content": content, "headers": {"Content-Type": "application/json"}}
    return {"data": fields, "files": [("images", file) for file in held]}
