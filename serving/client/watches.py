"""Client methods for watches and feeds."""

import random
import time
from collections.abc import Generator, Iterable
from typing import SupportsIndex

import httpx

from serving.client.messages import RejectedError, check_iterable, path_of, query_fields
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
from serving.watches.schemas import (
    Ended,
    FeedPosition,
    FrameError,
    Listening,
    Waiting,
    WatchHit,
    WatchInfo,
    WatchList,
)

_RECONNECT_SECONDS = 1.0
# The server sends each listener a line at least every 10 s.
_LISTEN_TIMEOUT_SECONDS = 30.0
_LISTENER_LOST = ("listener_lost", "watches_down")


class StandingQueries:
    """The `Client` methods for watches and feeds."""

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
        webhook_url: str | None = None,
        webhook_secret: str | None = None,
    ) -> WatchInfo:
        """Create a watch: a query that runs on every frame of `feeds` (default: all feeds). It
        expires after `ttl_seconds`.

        - `webhook_url`: where the server sends the hits, if it allows this host.
        - `webhook_secret`: the key that signs them.

        Not retried, because a retry could create a second watch. Raises RejectedError. Raises
        OSError if there is no response; the watch may still have been created, so check `watches`.
        """
        body = query_fields(classes, recall, threshold) | {
            "ttl_seconds": ttl_seconds,
            "label": label,
        }
        if webhook_url is not None:
            body["webhook"] = {"url": webhook_url, "secret": webhook_secret}
        response = self._transport.request_once(
            "POST", "/v1/watches", json=body | {"feeds": list(check_iterable("feeds", feeds))}
        )
        return self._transport.read(response, WatchInfo)

    def watches(self) -> list[WatchInfo]:
        """Return your watches, oldest first. Raises RejectedError and OSError."""
        return self._transport.request(WatchList, "GET", "/v1/watches").watches

    def renew_watch(self, watch_id: str, *, ttl_seconds: float | None = None) -> WatchInfo:
        """Restart a watch's time to live, with the same duration or a new one. Not retried.

        Raises RejectedError. Raises OSError if there is no response; the watch may still have been
        renewed.
        """
        body = {} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}
        response = self._transport.request_once("PATCH", path_of("watches", watch_id), json=body)
        return self._transport.read(response, WatchInfo)

    def delete_watch(self, watch_id: str) -> None:
        """Delete a watch. Not retried. Raises RejectedError, with status 404 if it does not exist.
        Raises OSError if there is no response; the watch may still have been deleted."""
        self._transport.request_once("DELETE", path_of("watches", watch_id))

    def feed(
        self,
        name: str,
        frames: Iterable[Input | Item],
        *,
        latest: bool = False,
        acknowledge: bool = False,
    ) -> Generator[FeedEvent, None, None]:
        """Send frames to a feed. Yields the hits of your own watches, a `FrameError` for each
        rejected frame and, at the end, `FeedDone`.

        - `latest`: skip frames if newer ones are available.
        - `acknowledge`: also yield `Acknowledged` for each processed frame.

        The request is sent when the first event is read. A frame has the same id as its `Item`; the
        default is the zero-based position of the frame. Otherwise, `feed` works like `stream` and
        raises the same errors.
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

    def feed_position(self, name: str) -> str | int | None:
        """Return the id of the last answered frame that you sent to a feed, None if there is none.
        To resume a feed, send the frames after it. Raises RejectedError and OSError."""
        return self._transport.request(FeedPosition, "GET", path_of("feeds", name)).frame

    def listen(
        self, watch_id: str, *, after: int | None = None
    ) -> Generator[ListenEvent, None, None]:
        """Yield the hits of a watch as they occur, whichever client sends the frames. The last
        event is `Ended`.

        - `after`: first yield the stored hits after this cursor; 0 yields all stored hits. By
          default, only new hits are yielded.

        Reconnects if the connection, the replica or the server is lost, yields `Listening` again
        and continues after the last hit. A `Dropped` event counts the hits that exceeded the
        server's limit of stored hits before you read them. Raises RejectedError. Raises OSError if
        every attempt to reconnect fails for `retry_seconds`, or if no valid event arrives for that
        long.
        """
        path = f"{path_of('watches', watch_id)}/hits"
        limits = httpx.Timeout(self._timeout, read=max(self._timeout, _LISTEN_TIMEOUT_SECONDS))
        silent_since: float | None = time.monotonic()
        while True:
            try:
                for event in self._transport.stream_events(
                    LISTEN_EVENTS,
                    "GET",
                    path,
                    params={} if after is None else {"after": after},
                    timeout=limits,
                ):
                    silent_since = None
                    if isinstance(event, WatchHit | Listening) and event.cursor is not None:
                        after = event.cursor
                    if not isinstance(event, Waiting | FrameError):
                        yield event
                    if isinstance(event, Ended):
                        return
            except (ConnectionError, RejectedError) as error:
                if not _can_resume(error):
                    raise
                # Listening does not change anything on the server, so it is safe to retry.
                now, limit = time.monotonic(), self._transport.retry_seconds
                silent_since = silent_since or now
                if now - silent_since > limit:
                    raise OSError(f"no event for {limit:g} s: {error}") from error
            time.sleep(_RECONNECT_SECONDS * random.uniform(0.5, 1.0))


def _can_resume(error: ConnectionError | RejectedError) -> bool:
    if isinstance(error, ConnectionError):
        return True
    return error.status == 200 and error.code in _LISTENER_LOST
