"""Client methods for standing queries: watches, feeds and listening."""

import random
import time
from collections.abc import Generator, Iterable
from typing import SupportsIndex

import httpx

from serving.client.messages import RefusedError, check_iterable, path_of, query_fields
from serving.client.ndjson import (
    FEED_EVENTS,
    LISTEN_EVENTS,
    NDJSON,
    FeedEvent,
    Input,
    Item,
    ListenEvent,
    lines_of,
)
from serving.client.transport import Transport
from serving.watches.schemas import Ended, FrameError, Waiting, WatchInfo, WatchList

_RELISTEN_SECONDS = 1.0
# The server sends each listener a line at least every 10 s.
_LISTEN_TIMEOUT_SECONDS = 30.0
_LISTENER_LOST = ("listener_lost", "watches_down")


class StandingQueries:
    """The methods of a `Client` that are about watches."""

    def __init__(self, transport: Transport, timeout: float) -> None:
        self._transport, self._timeout = transport, timeout

    def create_watch(
        self,
        classes: Iterable[str | SupportsIndex],
        *,
        ttl_seconds: float,
        recall: float | None = None,
        threshold: float | None = None,
        feeds: Iterable[str] = (),
        label: str | None = None,
    ) -> WatchInfo:
        """Create a watch, a query on every frame of these feeds, or of all, for `ttl_seconds`.

        Not retried, because that could create a second watch. Raises RefusedError. Raises OSError
        if there is no response; the watch may have been created nevertheless, see `watches`.
        """
        body = query_fields(classes, recall, threshold) | {
            "ttl_seconds": ttl_seconds,
            "label": label,
        }
        answer = self._transport.request_once(
            "POST", "/v1/watches", json=body | {"feeds": list(check_iterable("feeds", feeds))}
        )
        return self._transport.read(answer, WatchInfo)

    def watches(self) -> list[WatchInfo]:
        """Your watches, oldest first. Raises RefusedError and OSError."""
        return self._transport.request(WatchList, "GET", "/v1/watches").watches

    def renew_watch(self, watch_id: str, *, ttl_seconds: float | None = None) -> WatchInfo:
        """Restart the time to live of a watch, with the same duration or a new one. Not retried.

        Raises RefusedError. Raises OSError if there is no response; the watch may have been renewed
        nevertheless.
        """
        body = {} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}
        answer = self._transport.request_once("PATCH", path_of("watches", watch_id), json=body)
        return self._transport.read(answer, WatchInfo)

    def delete_watch(self, watch_id: str) -> None:
        """Delete a watch. Not retried. Raises RefusedError, with status 404 if it does not exist.
        Raises OSError if there is no response; the watch may have been deleted nevertheless."""
        self._transport.request_once("DELETE", path_of("watches", watch_id))

    def feed(
        self,
        name: str,
        frames: Iterable[Input | Item],
        *,
        latest: bool = False,
        acknowledge: bool = False,
    ) -> Generator[FeedEvent, None, None]:
        """Send frames to a feed. Yields the hits of your own watches, a `FrameError` for each frame
        that is rejected, and finally `FeedDone`. See docs/api.md for `latest` and `acknowledge`.

        Nothing is sent until the first event is requested. A frame's id is that of its `Item` or,
        without one, its position, from 0. Otherwise this works like `stream` and raises the same
        errors.
        """
        flags = {"latest": latest, "acknowledge": acknowledge}
        return self._transport.stream_events(
            FEED_EVENTS,
            "POST",
            path_of("feeds", name),
            params={flag: True for flag, is_set in flags.items() if is_set},
            content=lines_of(check_iterable("frames", frames)),
            headers={"Content-Type": NDJSON},
        )

    def listen(self, watch_id: str) -> Generator[ListenEvent, None, None]:
        """Yield hits of a watch as they occur, whoever sends the frames, until it has `Ended`.

        Reconnects if the connection or the replica is lost. Hits during that time are lost: hits
        are kept only from each `Listening` on. `Dropped` counts hits that were not read fast
        enough. Raises RefusedError. Raises OSError if reconnecting fails for `patience` seconds, or
        no valid event arrives for that long.
        """
        path = f"{path_of('watches', watch_id)}/hits"
        limits = httpx.Timeout(self._timeout, read=max(self._timeout, _LISTEN_TIMEOUT_SECONDS))
        silent_since: float | None = time.monotonic()
        while True:
            try:
                for event in self._transport.stream_events(
                    LISTEN_EVENTS, "GET", path, timeout=limits
                ):
                    silent_since = None
                    if not isinstance(event, Waiting | FrameError):
                        yield event
                    if isinstance(event, Ended):
                        return
            except (ConnectionError, RefusedError) as error:
                if not _can_resume(error):
                    raise
                # Listening changes nothing on the server, so it is safe to retry.
                now, patience = time.monotonic(), self._transport.patience
                silent_since = silent_since or now
                if now - silent_since > patience:
                    raise OSError(f"nothing was heard for {patience:g} s: {error}") from error
            time.sleep(_RELISTEN_SECONDS * random.uniform(0.5, 1.0))


def _can_resume(error: ConnectionError | RefusedError) -> bool:
    if isinstance(error, ConnectionError):
        return True
    return error.status == 200 and error.code in _LISTENER_LOST
