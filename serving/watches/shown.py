"""How a watch is shown to the client that made it, to servers and clients alike."""

from datetime import datetime

from pydantic import BaseModel, Field

from serving.verdicts import ClassThreshold


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
