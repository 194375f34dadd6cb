"""Query a running server from Python: `Client("http://127.0.0.1:8000").query(["husky"],
[Path(…)])`.

Does not import torch or Ray. Requests that are rejected because the server is busy, or that fail
because a replica died, are retried if they are idempotent. All queries are.
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
