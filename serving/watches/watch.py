"""A watch, and the interface between replicas and the process that stores the watches.

Does not import torch, Ray or HTTP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, StringConstraints

# Safe in URLs without escaping.
FeedName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Terms(BaseModel):
    """What a watch asks for: classes by name, decided by the threshold for a recall or a given
    one."""

    model_config = ConfigDict(frozen=True)

    classes: tuple[str, ...]
    recall: float | None
    threshold: float | None
    ttl_seconds: float
    feeds: tuple[FeedName, ...] = ()  # empty: all feeds
    label: str | None = None


class Watch(Terms):
    """A stored query of `client`. Times are in seconds since 1970."""

    id: str
    client: str
    created_at: float
    expires_at: float

    def looks_at(self, feed: str) -> bool:
        return not self.feeds or feed in self.feeds


@dataclass(frozen=True)
class WatchState:
    """A watch as replicas need it. Hits of a watch without listeners go only to its owner."""

    watch: Watch
    is_listened: bool


@dataclass(frozen=True)
class Changes:
    """The changes since a version. `is_whole`: `states` is the complete list.

    `epoch` changes when the process that stores the watches restarts. `now` is the time of the
    clock by which watches expire.
    """

    epoch: str
    version: int
    now: float
    is_whole: bool
    states: tuple[WatchState, ...]
    gone: tuple[str, ...]


@dataclass(frozen=True)
class HitBatch:
    """Hits for a listener, each a line of JSON, preceded by `dropped` hits that it was too slow
    for.

    `ended`: the reason why no hits will follow; None if more may follow.
    """

    lines: tuple[str, ...]
    dropped: int
    ended: str | None


# Each error has a single string argument, so that it can be pickled between processes.
class WatchError(Exception):
    """An operation on watches that failed."""


class UnknownWatchError(WatchError):
    """This client has no such watch."""


class UnknownListenerError(WatchError):
    """The listener's hits are no longer kept: it was inactive for too long, or there was a
    restart."""


class WatchLimitError(WatchError):
    """There are too many watches."""


class ListenerLimitError(WatchError):
    """There are too many listeners."""


class WatchesDownError(WatchError):
    """The process that stores the watches does not respond."""


class Watches(Protocol):
    """Stores the watches of all replicas. Every method may raise WatchesDownError."""

    async def create(self, client: str, terms: Terms) -> Watch:
        """Raises WatchLimitError."""
        ...

    async def owned(self, client: str) -> list[Watch]: ...

    async def get(self, client: str, watch_id: str) -> Watch:
        """Raises UnknownWatchError, also for another client's watch."""
        ...

    async def change(self, client: str, watch_id: str, fields: Mapping[str, object]) -> Watch:
        """Renew a watch and replace `fields` of its terms. Raises UnknownWatchError."""
        ...

    async def remove(self, client: str, watch_id: str) -> None:
        """Raises UnknownWatchError."""
        ...

    async def changed_since(self, epoch: str, version: int, wait_seconds: float) -> Changes:
        """The changes: immediately if there are any, otherwise after at most `wait_seconds`."""
        ...

    async def publish(self, hits: Sequence[tuple[str, str]], lost: Mapping[str, int]) -> None:
        """Deliver hits (watch id, line of JSON) to listeners, and the number of hits lost per
        watch."""
        ...

    async def listen(self, client: str, watch_id: str) -> str:
        """Add a listener and return its id. Raises UnknownWatchError and ListenerLimitError."""
        ...

    async def take(self, listener: str, wait_seconds: float) -> HitBatch:
        """Hits for a listener, waiting like `changed_since`. Raises UnknownListenerError."""
        ...

    async def leave(self, listener: str) -> None:
        """Remove a listener, if it exists."""
        ...
