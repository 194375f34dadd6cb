"""What a feed sends -> frames. A wrong one is one, too: it is answered and the feed goes on."""

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from serving.config import ServingConfig
from serving.errors import ApiError, invalid
from serving.http.bodies import one_input
from serving.http.strict_json import parse_json
from serving.watches.frame import Frame
from serving.watches.lines import FrameId, FrameTime
from trainer.bundle_spec import Reads


class _Said(BaseModel):
    id: FrameId | None = Field(None, description="comes back with whatever is said of this frame")
    time: FrameTime | None = Field(None, description="comes back with its hits")


class FrameIn(_Said):
    """One picture, or one text."""

    model_config = ConfigDict(extra="forbid")

    image: StrictStr | None = Field(None, description="a picture file in base64, or its data URL")
    text: StrictStr | None = None


def most_json_bytes(limits: ServingConfig) -> int:
    """Bytes of a frame's JSON: in base64, with room for the rest; a text may be all escapes."""
    return max(limits.max_frame_bytes * 4 // 3, limits.max_text_chars * 12) + 2000


def frame_of_json(raw: bytes | None, place: int, reads: Reads, limits: ServingConfig) -> Frame:
    """A line of JSON, `raw`, or None for one that was too long -> a frame, maybe a wrong one."""
    said = _Said()
    try:
        if raw is None:
            raise _too_long(limits.max_frame_bytes)
        found = parse_json(raw)
        said = _said(found)
        content: bytes | str | ApiError = _content(found, reads, limits)
    except ApiError as error:
        content = error
    return Frame(place if said.id is None else said.id, content, said.time)


def frame_of_bytes(raw: bytes, place: int, reads: Reads, limits: ServingConfig) -> Frame:
    """A picture's bytes -> a frame, maybe a wrong one."""
    try:
        if reads == "texts":
            message = 'this model reads texts: send text messages of JSON, {"text": …}'
            raise ApiError(422, "not_a_picture_model", message)
        return Frame(place, _bounded(raw, limits.max_frame_bytes))
    except ApiError as error:
        return Frame(place, error)


def _said(found: object) -> _Said:
    """What a frame says of itself, even of a wrong one, if that is usable."""
    try:
        return _Said.model_validate(found)
    except ValidationError:
        return _Said()


def _content(found: object, reads: Reads, limits: ServingConfig) -> bytes | str:
    try:
        frame = FrameIn.model_validate(found)
    except ValidationError as error:
        raise invalid("invalid_frame", error) from error
    found = one_input(frame.image, frame.text, "invalid_frame", reads, limits)
    return found if isinstance(found, str) else _bounded(found, limits.max_frame_bytes)


def _bounded(raw: bytes, limit: int) -> bytes:
    if len(raw) > limit:
        raise _too_long(limit)
    return raw


def _too_long(limit: int) -> ApiError:
    message = f"the frame is over {limit} bytes: send a smaller picture or text"
    return ApiError(413, "frame_too_long", message)
