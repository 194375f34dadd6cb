"""What the client reads of an answer that is no stream of lines, and its error, `RefusedError`."""

from contextlib import closing
from typing import Literal

import httpx
from pydantic import BaseModel, PositiveInt

from serving.schemas import ErrorBody

NOT_OURS = "status {}, and no JSON of kway's: is it a kway server?"
BUSY = (429, 503)
_PROXYS = (502, 504)
_LONGEST_WAIT_SECONDS = 5.0
# All verdicts of the largest question are some 10 MB.
_MAX_ANSWER_BYTES = 256 * 2**20


class RefusedError(ValueError):
    """The server refuses: its status, its code for programs, and its words as `reason`.

    The status is 200 where it had begun to answer: the code says why it ends.
    """

    def __init__(self, url: str, status: int, code: str, reason: str) -> None:
        super().__init__(f"{url} refuses: {reason}")
        self.status, self.code, self.reason = status, code, reason


def whole(answer: httpx.Response, url: str) -> httpx.Response:
    """An answer that has begun, read to its end.

    Raises RefusedError for one of more than 256 MiB, and httpx.RequestError.
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


def may_help_again(answer: httpx.Response) -> bool:
    """Busy, or a proxy's word about a replica that died; what kway itself says is final."""
    if answer.status_code in BUSY + _PROXYS:
        return True
    return answer.status_code == 500 and reason_of(answer)[0] == ""


def reason_of(answer: httpx.Response) -> tuple[str, str]:
    """The code, "" where the answer is not kway's, and the words of a refusal."""
    try:
        error = ErrorBody.model_validate_json(answer.content).error
    except ValueError:
        return "", NOT_OURS.format(answer.status_code)
    return error.code, error.message


def retry_after(answer: httpx.Response) -> float:
    """The seconds that the server asks to wait, 5 at most."""
    stated = answer.headers.get("Retry-After", "")
    # Of thousands of digits Python would make no number.
    is_number = stated.isascii() and stated.isdecimal()
    return min(float(stated[:9]), _LONGEST_WAIT_SECONDS) if is_number else 0.0


class Limits(BaseModel):
    """What one request, and one frame, may hold."""

    max_inputs: PositiveInt
    max_text_chars: PositiveInt
    max_body_bytes: PositiveInt
    max_frame_bytes: PositiveInt | None = None  # older servers do not say it


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


class GalleryFound(BaseModel):
    name: str
    num_items: int
    reads: Literal["pictures", "texts"]
    thumbnails: bool


class GalleriesFound(BaseModel):
    galleries: list[GalleryFound]
