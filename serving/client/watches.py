"""Standing queries as methods: watches, the feeds that they look at, and listening to them."""

import random
import time
from collections.abc import Generator, Iterable
from typing import SupportsIndex

import httpx

from serving.client.messages import RefusedError, check_iterable, path_of, question
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
# The server sends a listener a line every 10 s.
_LISTEN_TIMEOUT_SECONDS = 30.0
_LISTENER_LOST = ("listener_lost", "watches_down")


class StandingQueries:
    """The part of a `Client` that is about watches."""

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
        """Ask a question of every frame of these feeds, or of all, for so long.

        Sent once, for a watch made twice is two. Raises RefusedError, and OSError where it may have
        been made all the same: see `watches`.
        """
        body = question(classes, recall, threshold) | {"ttl_seconds": ttl_seconds, "label": label}
        answer = self._transport.request_once(
            "POST", "/v1/watches", json=body | {"feeds": list(check_iterable("feeds", feeds))}
        )
        return self._transport.read(answer, WatchInfo)

    def watches(self) -> list[WatchInfo]:
        """Your watches, oldest first. Raises RefusedError and OSError."""
        return self._transport.request(WatchList, "GET", "/v1/watches").watches

    def renew_watch(self, watch_id: str, *, ttl_seconds: float | None = None) -> WatchInfo:
        """Let the time of a watch run anew, the same as before or another. Sent once.

        Raises RefusedError, and OSError where it may have been done all the same.
        """
        body = {} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}
        answer = self._transport.request_once("PATCH", path_of("watches", watch_id), json=body)
        return self._transport.read(answer, WatchInfo)

    def delete_watch(self, watch_id: str) -> None:
        """End a watch. Sent once. Raises RefusedError, 404 where there is none, and OSError where
        it may have been done all the same."""
        self._transport.request_once("DELETE", path_of("watches", watch_id))

    def feed(
        self,
        name: str,
        frames: Iterable[Input | Item],
        *,
        latest: bool = False,
        acknowledge: bool = False,
    ) -> Generator[FeedEvent, None, None]:
        """Send frames to a feed. Gives the hits of your own watches, a `FrameError` for each frame
        that is refused, and `FeedDone` at the end; `latest` and `acknowledge` as in docs/api.md.

        Nothing is sent before the first of these is asked for. A frame is named by the id of its
        `Item` or, without one, its place, from 0. All else, and what it raises, is as in `stream`.
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
        """Hits of a watch as they come, whoever sends the frames, until it has `Ended`.

        Listens again where the connection or the replica is lost. Hits of that moment are lost with
        it, and each `Listening` says that hits are kept from here on; `Dropped` counts those that
        were not read fast enough. Raises RefusedError, and OSError where it cannot listen again
        within the patience, or no event can be parsed for so long.
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
                # A listener changes nothing: it comes again.
                now, patience = time.monotonic(), self._transport.patience
                silent_since = silent_since or now
                if now - silent_since > patience:
                    raise OSError(f"nothing was heard for {patience:g} s: {error}") from error
            time.sleep(_RELISTEN_SECONDS * random.uniform(0.5, 1.0))


def _can_resume(error: ConnectionError | RefusedError) -> bool:
    if isinstance(error, ConnectionError):
        return True
    return error.status == 200 and error.code in _LISTENER_LOST
