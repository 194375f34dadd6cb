"""What a feed and a listener are told, one JSON object a line or message."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr

from serving.refusals import ErrorDetail

FrameId = (
    Annotated[StrictStr, Field(max_length=200)] | Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
)
FrameTime = (
    Annotated[StrictStr, Field(max_length=64)]
    | Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
    | Annotated[StrictFloat, Field(allow_inf_nan=False)]
)


class WatchHit(BaseModel):
    """A frame is of a class that a watch asks for."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    watch: str
    label: str | None
    feed: str
    frame: FrameId = Field(description="the frame's id or, without one, its place in the feed")
    time: FrameTime | None = Field(description="as the feed gave it")
    class_name: str = Field(alias="class")
    class_id: int
    score: float
    threshold: float


class FrameError(BaseModel):
    """What is wrong with one frame or, without `frame`, why a stream ends."""

    frame: FrameId | None = None
    error: ErrorDetail


class Acknowledged(BaseModel):
    """A frame was answered, after its hits; for feeds that ask for it."""

    answered: FrameId
    hits: int


class Dropped(BaseModel):
    """Frames that a newer one has replaced, or hits that a listener was too slow for."""

    dropped: int


class FeedCounts(BaseModel):
    frames: int = Field(description="all that came, the refused and dropped ones included")
    hits: int = Field(description="of the sender's own watches")
    errors: int = Field(description="frames that were refused")
    dropped: int = Field(description="frames that a newer one has replaced")


class FeedDone(BaseModel):
    """The last line: all frames are answered."""

    done: FeedCounts


class Waiting(BaseModel):
    """No hit for some seconds; the connection is alive."""

    waiting: Literal[True] = True


class Listening(BaseModel):
    """The first line: hits from now on are kept for this listener."""

    listening: str = Field(description="the watch")


class Ended(BaseModel):
    """The last line: no hit will follow, the watch has `expired` or was `deleted`."""

    end: str
