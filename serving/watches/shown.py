"""How a watch is shown to the client that made it, to servers and clients alike."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field


class WatchedClass(BaseModel):
    """A class, and the score from which a frame is of it."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    class_name: str = Field(alias="class")
    class_id: int
    threshold: float | None
    threshold_source: str | None


class WatchInfo(BaseModel):
    id: str
    label: str | None
    classes: list[WatchedClass]
    recall: float | None
    threshold: float | None
    feeds: list[str] = Field(description="none: all of them")
    ttl_seconds: float
    created_at: datetime
    expires_at: datetime


class WatchList(BaseModel):
    watches: list[WatchInfo]
