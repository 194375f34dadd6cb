"""Watches, and the interface between replicas and the process that stores them.

Does not import torch, Ray or HTTP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from serving.watches.webhook import Webhook

# Safe in URLs without escaping.
FeedName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Terms(BaseModel):
    """The definition of a watch. Classes are names. Either `recall` or `threshold` is set; `recall`
    selects the per-class thresholds."""

    model_config = ConfigDict(frozen=True)

    classes: tuple[str, ...]
    recall: float | None
    threshold: float | None
    ttl_seconds: float
    feeds: tuple[FeedName, ...] = ()  # empty: all feeds
    label: str | None = None
    webhook: Webhook | None = None


class Delivery(BaseModel):
    """The delivery of a watch's hits to its webhook. Times are in seconds since 1970.

    - `cursor`: the hits up to this one have been delivered. `pending` is the number of later ones.
    - `failures`, `error`: number of failed attempts since the last delivery, and the last reason.
    """

    model_config = ConfigDict(frozen=True)

    cursor: int
    pending: int
    delivered_at: float | None
    failures: int
    error: str | None
    next_attempt_at: float | None


class Watch(Terms):
    """A stored query of `client`. Times are in seconds since 1970. `delivery` is set if the watch
    is shown to a client."""

    id: str
    client: str
    created_at: float
    expires_at: float
    delivery: Delivery | None = Field(None, exclude=True)

    def selects(self, feed: str) -> bool:
        return not self.feeds or feed in self.feeds


@dataclass(frozen=True)
class Changes:
    """The changes since a version, or all watches if `is_complete`.

    `epoch` changes when the process that stores the watches restarts. `now` is the time of the
    clock that determines when watches expire. `removed` contains watch ids.
    """

    epoch: str
    version: int
    now: float
    is_complete: bool
    watches: tuple[Watch, ...]
    removed: tuple[str, ...]


@dataclass(frozen=True)
class HitBatch:
    """Hits for a listener, each a line of JSON.

    - `dropped`: number of earlier hits that are not stored any more, because newer ones exceeded a
      limit.
    - `ended`: the reason why no more hits will follow, or None.
    """

    lines: tuple[str, ...]
    dropped: int
    ended: str | None


# Each error has a single string argument, so that it can be pickled and sent between processes.
class WatchError(Exception):
    """An operation on watches failed."""


class UnknownWatchError(WatchError):
    """The client does not have this watch."""


class UnknownListenerError(WatchError):
    """The listener has expired, or the process that stores the watches has restarted."""


class UnknownCursorError(WatchError):
    """The watch does not have a hit with this cursor yet."""


class WatchLimitError(WatchError):
    """There are too many watches."""


class NoWatchesError(WatchError):
    """The server does not keep watches."""


class ListenerLimitError(WatchError):
    """There are too many listeners."""


class WatchesDownError(WatchError):
    """The process that stores the watches does not respond."""


class Watches(Protocol):
    """Stores the watches of all replicas. Every method may raise WatchesDownError."""

    async def create(self, client: str, terms: Terms) -> Watch:
        """Create a watch. Raises WatchLimitError or NoWatchesError."""
        ...

    async def owned(self, client: str) -> list[Watch]:
        """Return the client's watches, oldest first."""
        ...

    async def get(self, client: str, watch_id: str) -> Watch:
        """Return a watch. Raises UnknownWatchError, even if the watch belongs to another client."""
        ...

    async def change(self, client: str, watch_id: str, fields: Mapping[str, object]) -> Watch:
        """Renew a watch and replace `fields` of its terms. Raises UnknownWatchError."""
        ...

    async def remove(self, client: str, watch_id: str) -> None:
        """Delete a watch. Raises UnknownWatchError."""
        ...

    async def changed_since(self, epoch: str, version: int, wait_seconds: float) -> Changes:
        """Return the changes since a version. If there are none, wait for at most
        `wait_seconds`."""
        ...

    async def publish(
        self, hits: Sequence[tuple[str, str]], positions: Mapping[tuple[str, str], str | int]
    ) -> list[int | None]:
        """Store hits, as pairs (watch id, line of JSON), and the ids of the last answered frames,
        by client and feed. Return the cursors of the hits, None for a watch that has ended."""
        ...

    async def position(self, client: str, feed: str) -> str | int | None:
        """Return the stored id of the last answered frame that the client sent to a feed."""
        ...

    async def listen(
        self, client: str, watch_id: str, after: int | None, limit_key: str | None = None
    ) -> tuple[str, int]:
        """Add a listener and return its id and its cursor: `after`, or the newest hit's if None.
        The limit on listeners per client applies to `limit_key`, by default the client. Raises
        UnknownWatchError, UnknownCursorError and ListenerLimitError."""
        ...

    async def take(self, listener: str, wait_seconds: float) -> HitBatch:
        """Return the next hits for a listener. If there are none, wait for at most `wait_seconds`.
        Raises UnknownListenerError."""
        ...

    async def leave(self, listener: str) -> None:
        """Remove a listener, if it exists."""
        ...
