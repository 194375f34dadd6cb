"""Query a running server from Python: `Client("http://127.0.0.1:8000").query(["husky"],
[Path(…)])`.

Does not import torch or Ray. Idempotent requests, which include all queries, are retried if the
server is busy or a replica dies.
"""

from serving.client.client import Client
from serving.client.messages import RejectedError, joined
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
    "RejectedError",
    "WatchHit",
    "joined",
]
