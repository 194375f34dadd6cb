"""JSON schemas of watches and feeds: request bodies, responses and events.

The server and the client use this module. It does not import torch or FastAPI.
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

from serving.schemas import ClassDrift, ClassThreshold, ErrorDetail, Id
from serving.watches.watch import FeedName
from serving.watches.webhook import Webhook

FrameTime = (
    Annotated[StrictStr, Field(max_length=64)]
    | Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
    | Annotated[StrictFloat, Field(allow_inf_nan=False)]
)


class WatchHit(BaseModel):
    """A frame matches a class of a watch."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    id: str = Field(
        description="id of the hit: the same if a frame with the same id, time and content is sent "
        "to the feed again"
    )
    watch: str
    label: str | None
    feed: str
    frame: Id = Field(description="id of the frame (default: its position in the feed)")
    time: FrameTime | None = Field(description="time of the frame, as sent")
    class_name: str = Field(alias="class")
    class_id: int
    score: float
    threshold: float
    version: str | None = Field(
        None, description="version of the model that processed the frame; null for older hits"
    )
    # The last field, because the cursor is appended to the JSON of a hit when it is stored.
    cursor: int | None = Field(
        None,
        description="position among the hits of the watch, from 1 on; null if the watch has ended",
    )


class FrameError(BaseModel):
    """An error in one frame or, if `frame` is null, the reason why the stream ended early."""

    frame: Id | None = None
    error: ErrorDetail


class Acknowledged(BaseModel):
    """A frame has been processed and its hits are stored. Sent after its hits, if the feed requests
    acknowledgements."""

    answered: Id
    hits: int


class Dropped(BaseModel):
    """The number of frames replaced by newer ones, or the number of hits that were dropped before
    the listener received them."""

    dropped: int


class FeedCounts(BaseModel):
    frames: int = Field(
        description="number of received frames, including rejected and dropped ones"
    )
    hits: int = Field(description="number of hits of the sender's own watches")
    errors: int = Field(description="number of rejected frames")
    dropped: int = Field(description="number of frames replaced by newer ones")


class FeedDone(BaseModel):
    """The last line: all frames have been processed."""

    done: FeedCounts


class Waiting(BaseModel):
    """Heartbeat, sent after a few seconds without a hit."""

    waiting: Literal[True] = True


class Listening(BaseModel):
    """The first line: all hits after the cursor follow."""

    listening: str = Field(description="id of the watch")
    cursor: int = Field(description="`after`, or the cursor of the newest hit")


class Ended(BaseModel):
    """The last line: the watch has `expired` or was `deleted`."""

    end: str


class FeedPosition(BaseModel):
    """How far a feed has been processed. Frames up to this one do not need to be sent again."""

    feed: str
    frame: Id | None = Field(
        description="id of the last answered frame; null if there is none. May be a second old "
        "while frames are being sent"
    )


class WebhookInfo(BaseModel):
    """A webhook and the state of its delivery. The secret is not shown."""

    url: str
    is_signed: bool = Field(description="whether the webhook has a secret")
    cursor: int = Field(description="the hits up to this cursor have been delivered")
    pending: int = Field(description="number of later hits, which have not been delivered yet")
    delivered_at: datetime | None = Field(description="time of the last delivery")
    failures: int = Field(description="number of failed attempts since the last delivery")
    error: str | None = Field(description="reason of the last failure")
    next_attempt_at: datetime | None = Field(description="time of the next attempt after a failure")


class WatchInfo(BaseModel):
    id: str
    label: str | None
    classes: list[ClassThreshold]
    missing_classes: list[str] = Field(
        [],
        description="classes that are not evaluated, because the current version of the model does "
        "not have them or does not have a threshold for them",
    )
    recall: float | None
    threshold: float | None
    feeds: list[str] = Field(description="feed names; if empty, all feeds")
    ttl_seconds: float
    created_at: datetime
    expires_at: datetime
    webhook: WebhookInfo | None = None
    drift: list[ClassDrift] = Field(
        [],
        description="one entry per class for which this replica has completed two periods "
        "(`--drift-period`)",
    )


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

    # An error must not contain the secret of a webhook.
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    classes: _Classes | None = Field(None, description="class names or ids")
    recall: _Recall | None = Field(
        None, description="target recall that selects the per-class thresholds"
    )
    threshold: _Threshold | None = Field(None, description="minimum score of a match")
    ttl_seconds: _Seconds | None = Field(
        None, description="time to live in seconds, reset on every change"
    )
    feeds: _Feeds | None = Field(None, description="feed names; if empty, all feeds")
    label: _Label | None = Field(None, description="text that is included in every hit")
    webhook: Webhook | None = Field(
        None, description="where the server sends the hits; in a change, null removes the webhook"
    )


class WatchBody(WatchChanges):
    """A query to evaluate on every frame. A recall or a threshold is required."""

    classes: _Classes = Field(description="class names or ids")
    ttl_seconds: _Seconds = Field(description="time to live in seconds, reset on every change")

    @model_validator(mode="after")
    def _has_threshold(self) -> Self:
        if self.recall is None and self.threshold is None:
            raise ValueError("a watch requires a threshold: set recall or threshold")
        return self


class ListenLine(RootModel[WatchHit | Listening | Waiting | Dropped | FrameError | Ended]):
    """A line that is sent to a listener."""
