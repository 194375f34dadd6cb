"""Messages between client and server: the fields of a query, the requests that a query is split
into to stay within the server's limits, and the responses."""

import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, PositiveInt

from serving.schemas import Answer, Classification, ErrorBody, ModelLogits

# Generous estimate of the overhead, in bytes, of each image or text in a request.
_EXTRA_BYTES = 1000
_POSITION = re.compile(r"^(images|texts)\[(\d{1,9})\]")
Kind = TypeVar("Kind")
Results = TypeVar("Results", Answer, Classification)
NOT_KWAY = "unexpected response with status {}: is it a kway server?"
BUSY = (429, 503)
_PROXY_ERRORS = (502, 504)
_LONGEST_WAIT_SECONDS = 5.0

Input = Path | bytes | str
# The answer to the largest possible query is about 10 MB.
_MAX_RESPONSE_BYTES = 256 * 2**20


class RejectedError(ValueError):
    """The server rejected a request. `status` is the HTTP status, `code` is machine-readable, and
    `reason` is the message.
    """

    def __init__(self, url: str, status: int, code: str, reason: str) -> None:
        super().__init__(f"{url} rejected the request: {reason}")
        self.status, self.code, self.reason = status, code, reason


def read_response(response: httpx.Response, url: str) -> httpx.Response:
    """Read a response to its end.

    Raises RejectedError if the response is larger than 256 MiB, and httpx.RequestError for a
    connection error.
    """
    body = bytearray()
    with closing(response):
        for part in response.iter_bytes():
            body += part
            if len(body) > _MAX_RESPONSE_BYTES:
                reason = f"response larger than {_MAX_RESPONSE_BYTES} bytes: is it a kway server?"
                raise RejectedError(url, response.status_code, "", reason)
    plain = [(name, value) for name, value in response.headers.items() if name == "retry-after"]
    return httpx.Response(response.status_code, headers=plain, content=bytes(body))


def is_retryable(response: httpx.Response) -> bool:
    """Return whether the server is busy, or a proxy reports that a replica died (500) or that none
    was available in time (408). Any other error from kway itself is final."""
    if response.status_code in BUSY + _PROXY_ERRORS:
        return True
    return response.status_code in (408, 500) and error_of(response)[0] == ""


def error_of(response: httpx.Response) -> tuple[str, str]:
    """Return the code and the message of an error response. The code is "" if the response is not
    from kway."""
    try:
        error = ErrorBody.model_validate_json(response.content).error
    except ValueError:
        return "", NOT_KWAY.format(response.status_code)
    return error.code, error.message


def retry_after(response: httpx.Response) -> float:
    """Return the delay in seconds that the server requests, at most 5."""
    header = response.headers.get("Retry-After", "")
    # Convert only the first 9 digits: Python rejects numbers with thousands of digits.
    is_number = header.isascii() and header.isdecimal()
    return min(float(header[:9]), _LONGEST_WAIT_SECONDS) if is_number else 0.0


class Limits(BaseModel):
    """The server's limits on one request."""

    max_inputs: PositiveInt
    max_text_chars: PositiveInt
    max_body_bytes: PositiveInt


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
    """One page of search results. `total` is the number of matching classes."""

    total: int
    classes: list[ClassFound]


def query_fields(
    classes: Iterable[str | SupportsIndex], **rule: float | str | None
) -> dict[str, Any]:
    """Return the JSON fields of a query: the classes, and the parts of the rule that are not None.

    Raises TypeError if `classes` is a single string or contains values other than names and ids.
    """
    names = [_class(one) for one in check_iterable("classes", classes)]
    return {"classes": names, **present(rule)}


def present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def check_iterable(name: str, value: Iterable[Kind]) -> Iterable[Kind]:
    """Return `value`. Raises TypeError for a single string, bytes or path, because the caller
    probably meant a list."""
    if isinstance(value, str | bytes | bytearray | Path):
        raise TypeError(f"{name} is a single {type(value).__name__}: pass a list")
    return value


def check_input(one: object) -> None:
    """Raise TypeError if the object is not an input."""
    if not isinstance(one, Path | bytes | str):
        raise TypeError(f"an input must be a Path, bytes or str, got {type(one).__name__}")


def as_text_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert the fields of a query for URLs and forms, in which all values are strings: a class ID
    becomes `#` followed by the number."""
    if "classes" not in fields:
        return fields
    names = [f"#{one}" if isinstance(one, int) else one for one in fields["classes"]]
    return fields | {"classes": names}


def requests(
    fields: dict[str, Any], inputs: Sequence[Input], limits: Limits
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Split the inputs into requests within the server's limits. Yields, for each request, the
    position of its first input and its arguments for httpx."""
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


def joined(parts: Sequence[Results]) -> Results:
    """Merge the answers to several requests, numbering the inputs consecutively."""
    results = [result for part in parts for result in part.results]
    numbered = [
        result.model_copy(update={"input": position}) for position, result in enumerate(results)
    ]
    return parts[0].model_copy(update={"results": numbered})


def renumbered(first: int, reason: str) -> str:
    """Add `first`, the position of the request's first input, to the index in an error such as
    "images[1]: …"."""
    return _POSITION.sub(lambda match: f"{match[1]}[{first + int(match[2])}]", reason)


def _class(one: str | SupportsIndex) -> str | int:
    if isinstance(one, str):
        return one
    if isinstance(one, bool) or not isinstance(one, SupportsIndex):
        raise TypeError(f"a class must be a name or an id, got {one!r}")
    return operator.index(one)


def _file(image: Path | bytes) -> tuple[str, bytes]:
    if isinstance(image, bytes):
        return "image", image
    return image.name, image.read_bytes()


def _request(fields: dict[str, Any], batch: Sequence[tuple[str, bytes] | str]) -> dict[str, Any]:
    """Return the httpx arguments of one request. Texts are sent as JSON, images as form files."""
    if isinstance(batch[0], str):
        content = json.dumps({**fields, "texts": batch})
        return {"content": content, "headers": {"Content-Type": "application/json"}}
    return {"data": as_text_fields(fields), "files": [("images", file) for file in batch]}


def path_of(*parts: str) -> str:
    """Return `/v1/KIND/NAME/…`. Raises ValueError for a name that would change the path."""
    for part in parts:
        if part in ("", ".", ".."):
            raise ValueError(f"{part!r} is not a valid name or id for /v1/{parts[0]}")
    return "/".join(["/v1", *(quote(part, safe="") for part in parts)])
