"""Messages between client and server: responses that are not streams of lines, the fields of a
query, and how queries are split into requests within the server's limits."""

import json
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, PositiveInt

from serving.client.ndjson import Input
from serving.schemas import Answer, ErrorBody, ModelLogits

# Generous estimate of the bytes that a request adds to each image or text.
_EXTRA_BYTES = 1000
_POSITION = re.compile(r"^(images|texts)\[(\d{1,9})\]")
Kind = TypeVar("Kind")
NOT_KWAY = "status {}, and no JSON of kway's: is it a kway server?"
BUSY = (429, 503)
_PROXY_ERRORS = (502, 504)
_LONGEST_WAIT_SECONDS = 5.0
# The verdicts for the largest possible query take about 10 MB.
_MAX_ANSWER_BYTES = 256 * 2**20


class RefusedError(ValueError):
    """The server rejected a request: `status`, a machine-readable `code`, and the message as
    `reason`.

    The status is 200 if the response had already begun; the code then tells why it ended.
    """

    def __init__(self, url: str, status: int, code: str, reason: str) -> None:
        super().__init__(f"{url} refuses: {reason}")
        self.status, self.code, self.reason = status, code, reason


def read_whole(answer: httpx.Response, url: str) -> httpx.Response:
    """Read a response to its end.

    Raises RefusedError if it has more than 256 MiB, and httpx.RequestError.
    """
    body = bytearray()
    with closing(answer):
        for part in answer.iter_bytes():
            body += part
            if len(body) > _MAX_ANSWER_BYTES:
                reason = f"its answer is over {_MAX_ANSWER_BYTES} bytes: is it a kway server?"
                raise RefusedError(url, answer.status_code, "", reason)
    plain = [(name, value) for name, value in answer.headers.items() if name == "retry-after"]
    return httpx.Response(answer.status_code, headers=plain, content=bytes(body))


def is_retryable(answer: httpx.Response) -> bool:
    """Whether the server is busy, or a proxy reports a dead replica. kway's own errors are
    final."""
    if answer.status_code in BUSY + _PROXY_ERRORS:
        return True
    return answer.status_code == 500 and error_of(answer)[0] == ""


def error_of(answer: httpx.Response) -> tuple[str, str]:
    """The code of an error response, or "" if it is not from kway, and its message."""
    try:
        error = ErrorBody.model_validate_json(answer.content).error
    except ValueError:
        return "", NOT_KWAY.format(answer.status_code)
    return error.code, error.message


def retry_after(answer: httpx.Response) -> float:
    """The seconds that the server asks to wait, at most 5."""
    stated = answer.headers.get("Retry-After", "")
    # Python rejects numbers of thousands of digits, so only the first 9 are converted.
    is_number = stated.isascii() and stated.isdecimal()
    return min(float(stated[:9]), _LONGEST_WAIT_SECONDS) if is_number else 0.0


class Limits(BaseModel):
    """The server's limits on one request and one frame."""

    max_inputs: PositiveInt
    max_text_chars: PositiveInt
    max_body_bytes: PositiveInt
    max_frame_bytes: PositiveInt | None = None  # not sent by older servers


class Served(BaseModel):
    """The model that a server serves."""

    reads: Literal["images", "texts"]
    recalls: list[float]
    logits: ModelLogits | None = None  # not sent by older servers
    limits: Limits


class ClassFound(BaseModel):
    id: int
    name: str


class ClassesFound(BaseModel):
    """One page of the `total` classes that a search found."""

    total: int
    classes: list[ClassFound]


def query_fields(
    classes: Iterable[str | SupportsIndex], recall: float | None, threshold: float | None
) -> dict[str, Any]:
    """The fields of a query, as in JSON.

    Raises TypeError if `classes` is not a list, or contains something other than names and numbers.
    """
    numbers = {"recall": recall, "threshold": threshold}
    given = {name: number for name, number in numbers.items() if number is not None}
    return {"classes": [_class(one) for one in check_iterable("classes", classes)], **given}


def check_iterable(what: str, given: Iterable[Kind]) -> Iterable[Kind]:
    """Return `given`. Raises TypeError for a single string, bytes or path, which would otherwise be
    iterated by character."""
    if isinstance(given, str | bytes | bytearray | Path):
        raise TypeError(f"{what} is one {type(given).__name__}: give a list")
    return given


def as_text_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a query for URLs and forms. These have no numbers, so a class id becomes `#`
    and the number."""
    names = [f"#{one}" if isinstance(one, int) else one for one in fields["classes"]]
    return fields | {"classes": names}


def requests(
    fields: dict[str, Any], inputs: Sequence[Input], limits: Limits
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Split the inputs into requests within the server's limits. Yields, one at a time, the
    position of the first input and the arguments for httpx."""
    batch: list[tuple[str, bytes] | str] = []
    size = 0
    for position, one in enumerate(inputs):
        part = one if isinstance(one, str) else _file(one)
        added = _EXTRA_BYTES + (len(json.dumps(part)) if isinstance(part, str) else len(part[1]))
        if batch and (len(batch) == limits.max_inputs or size + added > limits.max_body_bytes):
            yield position - len(batch), _request(fields, batch)
            batch, size = [], 0
        batch.append(part)
        size += added
    yield len(inputs) - len(batch), _request(fields, batch)


def joined(parts: Sequence[Answer]) -> Answer:
    """One answer for all inputs, numbered consecutively across the parts."""
    results = [result for part in parts for result in part.results]
    numbered = [
        result.model_copy(update={"input": position}) for position, result in enumerate(results)
    ]
    return parts[0].model_copy(update={"results": numbered})


def renumbered(first: int, reason: str) -> str:
    """Add `first`, the position of a request's first input, to the index in a server's "images[1]:
    …"."""
    return _POSITION.sub(lambda found: f"{found[1]}[{first + int(found[2])}]", reason)


def _class(one: str | SupportsIndex) -> str | int:
    if isinstance(one, str):
        return one
    if isinstance(one, bool) or not isinstance(one, SupportsIndex):
        raise TypeError(f"a class is a name or a number, and not {one!r}")
    return operator.index(one)


def _file(image: Path | bytes) -> tuple[str, bytes]:
    if isinstance(image, bytes):
        return "image", image
    return image.name, image.read_bytes()


def _request(fields: dict[str, Any], batch: Sequence[tuple[str, bytes] | str]) -> dict[str, Any]:
    """Texts are sent as JSON, images as the files of a form."""
    if isinstance(batch[0], str):
        content = json.dumps({**fields, "texts": batch})
        return {"content": content, "headers": {"Content-Type": "application/json"}}
    return {"data": as_text_fields(fields), "files": [("images", file) for file in batch]}


def path_of(kind: str, name: str) -> str:
    """`/v1/KIND/NAME`. Raises ValueError for a name that would result in a different path."""
    if name in ("", ".", ".."):
        raise ValueError(f"{name!r} names nothing of /v1/{kind}: give a name, or an id")
    return f"/v1/{kind}/{quote(name, safe='')}"
