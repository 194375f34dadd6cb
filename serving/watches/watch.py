"""A watch, and what is said of watches between replicas and the place that holds them.

Free of torch, Ray and HTTP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, StringConstraints

# Stands in URLs as it is.
FeedName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Terms(BaseModel):
    """What a watch asks for: classes by name, decided by a recall's threshold or a given one."""

    model_config = ConfigDict(frozen=True)

    classes: tuple[str, ...]
    recall: float | None
    threshold: float | None
    ttl_seconds: float
    feeds: tuple[FeedName, ...] = ()  # none: all of them
    label: str | None = None


class Watch(Terms):
    """A stored question of `client`; times are seconds since 1970."""

    id: str
    client: str
    created_at: float
    expires_at: float

    def looks_at(self, feed: str) -> bool:
        return not self.feeds or feed in self.feeds


@dataclass(frozen=True)
class WatchState:
    """A watch as replicas need it: hits of one that nobody listens to go to its owner alone."""

    watch: Watch
    is_listened: bool


@dataclass(frozen=True)
class Changes:
    """What is new since a version; `is_whole`: `states` is all there is.

    `epoch` is another after a restart of the place that holds the watches; `now` is the time by the
    clock that ends them.
    """

    epoch: str
    version: int
    now: float
    is_whole: bool
    states: tuple[WatchState, ...]
    gone: tuple[str, ...]


@dataclass(frozen=True)
class HitBatch:
    """Hits for a listener, each a line of JSON, after `dropped` ones that it was too slow for.

    `ended`: why none will follow, if none will.
    """

    lines: tuple[str, ...]
    dropped: int
    ended: str | None


# One string each: they travel between processes.
class WatchError(Exception):
    """A wish about watches that cannot be met."""


class UnknownWatchError(WatchError):
    """No such watch of this client."""


class UnknownListenerError(WatchError):
    """Its hits are no longer kept: it was silent for too long, or there was a restart."""


class WatchLimitError(WatchError):
    """There are too many watches."""


class ListenerLimitError(WatchError):
    """There are too many that listen."""


class WatchesDownError(WatchError):
    """What holds the watches does not answer now."""


class Watches(Protocol):
    """Where all watches live: one for all replicas. Every method may raise WatchesDownError."""

    async def create(self, client: str, terms: Terms) -> Watch:
        """Raises WatchLimitError."""
        ...

    async def owned(self, client: str) -> list[Watch]: ...

    async def get(self, client: str, watch_id: str) -> Watch:
        """Raises UnknownWatchError, for another client's watch, too."""
        ...

    async def change(self, client: str, watch_id: str, fields: Mapping[str, object]) -> Watch:
        """Renew a watch, with `fields` of its terms replaced; raises UnknownWatchError."""
        ...

    async def remove(self, client: str, watch_id: str) -> None:
        """Raises UnknownWatchError."""
        ...

    async def changed_since(self, epoch: str, version: int, wait_seconds: float) -> Changes:
        """What is new, at once if there is something, else after at most `wait_seconds`."""
        ...

    async def publish(self, hits: Sequence[tuple[str, str]], lost: Mapping[str, int]) -> None:
        """Hits (watch id, line of JSON) for listeners, and the numbers of those lost on the way."""
        ...

    async def listen(self, client: str, watch_id: str) -> str:
        """A new listener's id. Raises UnknownWatchError and ListenerLimitError."""
        ...

    async def take(self, listener: str, wait_seconds: float) -> HitBatch:
        """What has come for a listener, like `changed_since`. Raises UnknownListenerError."""
        ...

    async def leave(self, listener: str) -> None:
        """Forget a listener, if it is still known."""
        ...
