"""One image or text as a line of JSON, for `POST /v1/query:stream` and the frames of feeds."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from serving.api_error import ApiError, validated
from serving.config import ServingConfig
from serving.http.query_body import one_input
from serving.http.request_body import parse_json
from serving.schemas import Answer, Id, Verdict
from serving.watches.feed import Frame
from serving.watches.schemas import FrameTime
from trainer.bundle.spec import Reads


class _FrameFields(BaseModel):
    id: Id | None = Field(None, description="returned in all responses to this frame")
    time: FrameTime | None = Field(None, description="returned with the hits of this frame")


class FrameIn(_FrameFields):
    """One image or one text."""

    model_config = ConfigDict(extra="forbid")

    image: StrictStr | None = Field(None, description="base64-encoded image file, or a data URL")
    text: StrictStr | None = None


def max_json_bytes(limits: ServingConfig) -> int:
    """Return the maximum size of a frame's JSON in bytes: a base64-encoded image or a text of
    nothing but escape sequences (12 bytes for a surrogate pair), plus the other fields."""
    return max(limits.max_frame_bytes * 4 // 3, limits.max_text_chars * 12) + 2000


def frame_of_json(raw: bytes | None, position: int, reads: Reads, limits: ServingConfig) -> Frame:
    """Convert a line of JSON to a frame. `raw` is None if the line was too long.

    If the line is invalid, the content of the frame is the error.
    """
    fields = _FrameFields()
    try:
        if raw is None:
            raise _too_long(limits.max_frame_bytes)
        found = parse_json(raw)
        fields = _frame_fields(found)
        content: bytes | str | ApiError = _content(found, reads, limits)
    except ApiError as error:
        content = error
    return Frame(position if fields.id is None else fields.id, content, fields.time)


def frame_of_bytes(raw: bytes, position: int, reads: Reads, limits: ServingConfig) -> Frame:
    """Convert the bytes of an image to a frame. If they are not accepted, the content of the frame
    is the error."""
    try:
        if reads == "texts":
            message = 'this model accepts texts. Send text messages with JSON, {"text": …}'
            raise ApiError(422, "not_a_picture_model", message)
        return Frame(position, _bounded(raw, limits.max_frame_bytes))
    except ApiError as error:
        return Frame(position, error)


def _frame_fields(found: object) -> _FrameFields:
    """Return the id and time of a frame, if they are valid, even if the frame itself is not."""
    try:
        return _FrameFields.model_validate(found)
    except ValidationError:
        return _FrameFields()


def _content(found: object, reads: Reads, limits: ServingConfig) -> bytes | str:
    frame = validated(FrameIn, found, "invalid_frame")
    found = one_input(frame.image, frame.text, "invalid_frame", reads, limits)
    return found if isinstance(found, str) else _bounded(found, limits.max_frame_bytes)


def _bounded(raw: bytes, limit: int) -> bytes:
    if len(raw) > limit:
        raise _too_long(limit)
    return raw


def _too_long(limit: int) -> ApiError:
    message = f"the frame is larger than {limit} bytes. Send a smaller image or text"
    return ApiError(413, "frame_too_long", message)


class _LineId(BaseModel):
    id: Id | None = Field(None, description="returned in the response to this line")


class LineIn(_LineId):
    """One image or one text."""

    model_config = ConfigDict(extra="forbid")

    image: StrictStr | None = Field(None, description="base64-encoded image file, or a data URL")
    text: StrictStr | None = None


@dataclass(frozen=True)
class Line:
    """A parsed line. `id` is set if the line has a valid id. `content` is the model input, or the
    error if the line is invalid."""

    id: Id | None
    content: bytes | str | ApiError


def parse_line(raw: bytes, reads: Reads, limits: ServingConfig) -> Line:
    """Parse a line of JSON that contains an image or a text.

    Raises ApiError if the line is not JSON. Any other error is returned as the content.
    """
    found = parse_json(raw)
    try:
        line = validated(LineIn, found, "invalid_line")
        content = one_input(line.image, line.text, "invalid_line", reads, limits)
    except ApiError as error:
        return Line(_id_of(found), error)
    return Line(line.id, content)


def _id_of(found: object) -> Id | None:
    """Return the id of an invalid line, if the id is valid."""
    try:
        return _LineId.model_validate(found).id
    except ValidationError:
        return None


def selected_verdicts(answer: Answer, *, matches_only: bool) -> list[Verdict]:
    """Return the verdicts in the answer to a single input. If `matches_only`, return only the
    matches."""
    (result,) = answer.results
    return [one for one in result.verdicts if one.match or not matches_only]
