"""What is said of watches over HTTP; how one is shown is in `serving/watches/shown.py`."""

from typing import Annotated, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    StrictInt,
    StrictStr,
    model_validator,
)

from serving.watches.lines import Dropped, Ended, FrameError, Listening, Waiting, WatchHit
from serving.watches.watch import FeedName

_Classes = Annotated[list[StrictStr | StrictInt], Field(min_length=1, fail_fast=True)]
_Recall = Annotated[float, Field(gt=0, le=1)]
_Threshold = Annotated[float, Field(allow_inf_nan=False)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Feeds = Annotated[list[FeedName], Field(max_length=100, fail_fast=True)]
_Label = Annotated[StrictStr, Field(max_length=200)]


class WatchChanges(BaseModel):
    """What to change of a watch; its time runs anew, also where nothing is."""

    model_config = ConfigDict(extra="forbid")

    classes: _Classes | None = Field(None, description="class names, or ids")
    recall: _Recall | None = Field(None, description="decide by this recall's thresholds")
    threshold: _Threshold | None = Field(None, description="decide by this score")
    ttl_seconds: _Seconds | None = Field(None, description="how long it lives unless renewed")
    feeds: _Feeds | None = Field(None, description="the feeds that it looks at; none: all of them")
    label: _Label | None = Field(None, description="comes back with every hit")


class WatchBody(WatchChanges):
    """A question to ask of every frame. It needs a recall or a threshold: it has to decide."""

    classes: _Classes = Field(description="class names, or ids")
    ttl_seconds: _Seconds = Field(description="how long it lives unless renewed")

    @model_validator(mode="after")
    def _decides(self) -> Self:
        if self.recall is None and self.threshold is None:
            raise ValueError("a watch has to decide: give recall or threshold")
        return self


class ListenLine(RootModel[WatchHit | Listening | Waiting | Dropped | FrameError | Ended]):
    """One line of what a listener hears."""
