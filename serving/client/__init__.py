"""Asks a running server from Python: `Client("http://127.0.0.1:8000").query(["husky"], [Path(…)])`.

Free of torch and Ray. What is refused because the server is busy, and what a replica that died left
unanswered, is asked again where that changes nothing, as no question does: each is answered once
however often it was sent.
"""

from serving.client.client import Client
from serving.client.messages import RefusedError, joined
from serving.client.ndjson import Item
from serving.schemas import Done, GalleryHit, Hit, LineError
from serving.watches.schemas import (
    Acknowledged,
    Dropped,
    Ended,
    FeedDone,
    FrameError,
    Listening,
    WatchHit,
)

__all__ = [
    "Acknowledged",
    "Client",
    "Done",
    "Dropped",
    "Ended",
    "FeedDone",
    "FrameError",
    "GalleryHit",
    "Hit",
    "Item",
    "LineError",
    "Listening",
    "RefusedError",
    "WatchHit",
    "joined",
]
