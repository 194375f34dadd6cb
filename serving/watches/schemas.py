"""The JSON of watches and feeds: request bodies, watches as their owner sees them, and events.

Shared by server and client. Does not import torch or FastAPI.
"""

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from serving.schemas import ClassThreshold, ErrorDetail, Id
from serving.watches.watch import FeedName

FrameTime = (
    Annotated[StrictStr, Field(max_length=64)]
    | Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
    | Annotated[StrictFloat, Field(allow_inf_nan=False)]
)


class WatchHit(BaseModel):
    """A frame matches a class of a watch."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    watch: str
    label: str | None
    feed: str
    frame: Id = Field(description="the frame's id or, without one, its place in the feed")
    time: FrameTime | None = Field(description="as the feed gave it")
    class_name: str = Field(alias="class")
    class_id: int
    score: float
    threshold: float


class FrameError(BaseModel):
    """The error of one frame or, without `frame`, the reason why a stream ends."""

    frame: Id | None = None
    error: ErrorDetail


class Acknowledged(BaseModel):
    """A frame has been answered. Sent after its hits, to feeds that request it."""

    answered: Id
    hits: int


class Dropped(BaseModel):
    """Frames that were replaced by newer ones, or hits that a listener was too slow for."""

    dropped: int


class FeedCounts(BaseModel):
    frames: int = Field(description="all that came, the refused and dropped ones included")
    hits: int = Field(description="of the sender's own watches")
    errors: int = Field(description="frames that were refused")
    dropped: int = Field(description="frames that a newer one has replaced")


class FeedDone(BaseModel):
    """The last line: all frames have been answered."""

    done: FeedCounts


class Waiting(BaseModel):
    """Heartbeat: there was no hit for some seconds, and the connection is alive."""

    waiting: Literal[True] = True


class Listening(BaseModel):
    """The first line: from now on hits are kept for this listener."""

    listening: str = Field(description="the watch")


class Ended(BaseModel):
    """The last line: no hit will follow, because the watch has `expired` or was `deleted`."""

    end: str


class WatchInfo(BaseModel):
    id: str
    label: str | None
    classes: list[ClassThreshold]
    recall: float | None
    threshold: float | None
    feeds: list[str] = Field(description="none: all of them")
    ttl_seconds: float
    created_at: datetime
    expires_at: datetime


class WatchList(BaseModel):
    watches: list[WatchInfo]


_Classes = Annotated[list[StrictStr | StrictInt], Field(min_length=1, fail_fast=True)]
_Recall = Annotated[float, Field(gt=0, le=1)]
_Threshold = Annotated[float, Field(allow_inf_nan=False)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Feeds = Annotated[list[FeedName], Field(max_length=100, fail_fast=True)]
_Label = Annotated[StrictStr, Field(max_length=200)]


class WatchChanges(BaseModel):
    """Changes to a watch. Every change, even an empty one, restarts the watch's time to live."""

    model_config = ConfigDict(extra="forbid")

    classes: _Classes | None = Field(None, description="class names, or ids")
    recall: _Recall | None = Field(None, description="decide by this recall's thresholds")
    threshold: _Threshold | None = Field(None, description="decide by this score")
    ttl_seconds: _Seconds | None = Field(None, description="how long it lives unless renewed")
    feeds: _Feeds | None = Field(None, description="the feeds that it looks at; none: all of them")
    label: _Label | None = Field(None, description="comes back with every hit")


class WatchBody(WatchChanges):
    """A query to evaluate on every frame. It requires a recall or a threshold, because watches must
    decide."""

    classes: _Classes = Field(description="class names, or ids")
    ttl_seconds: _Seconds = Field(description="how long it lives unless renewed")

    @model_validator(mode="after")
    def _decides(self) -> Self:
        if self.recall is None and self.threshold is None:
            raise ValueError("a watch has to decide: give recall or threshold")
        return self


class ListenLine(RootModel[WatchHit | Listening | Waiting | Dropped | FrameError | Ended]):
    """One line sent to a listener."""
