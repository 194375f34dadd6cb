"""The lines of JSON (NDJSON) that the client sends and the events that it receives."""

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
from pydantic import TypeAdapter

from serving.schemas import Done, ErrorDetail, Hit, LineError
from serving.watches.schemas import (
    Acknowledged,
    Dropped,
    Ended,
    FeedDone,
    FrameError,
    Listening,
    Waiting,
    WatchHit,
)

NDJSON = "application/x-ndjson"
# A line that contains verdicts for 100 classes with long names is about 50 kB.
_MAX_LINE_BYTES = 16 * 2**20

Input = Path | bytes | str
StreamEvent = Hit | LineError | Done
FeedEvent = WatchHit | FrameError | Acknowledged | Dropped | FeedDone
ListenEvent = WatchHit | Listening | Dropped | Ended

STREAM_EVENTS: TypeAdapter[StreamEvent] = TypeAdapter(StreamEvent)
FEED_EVENTS: TypeAdapter[FeedEvent] = TypeAdapter(FeedEvent)
LISTEN_EVENTS: TypeAdapter[ListenEvent | Waiting | FrameError] = TypeAdapter(
    ListenEvent | Waiting | FrameError
)
# No event follows one of these.
FINAL_EVENTS = (Done, FeedDone, Ended)


class Item(NamedTuple):
    """An input to a stream or feed. The events for it have the same `id`.

    Only feeds use `time`.
    """

    content: Input
    id: str | int | None = None
    time: str | int | float | None = None


def lines_of(items: Iterable[Input | Item]) -> Iterator[bytes]:
    """Yield a line for each item. The default id of an item is its zero-based position.

    Raises OSError if a file cannot be read, and TypeError for an object that is not an input.
    """
    for position, one in enumerate(items):
        item = one if isinstance(one, Item) else Item(one)
        fields = _content(item.content) | {"id": position if item.id is None else item.id}
        if item.time is not None:
            fields["time"] = item.time
        yield json.dumps(fields).encode() + b"\n"


def check_input(one: object) -> None:
    """Raise TypeError if the object is not an input."""
    if not isinstance(one, Path | bytes | str):
        raise TypeError(f"an input must be a Path, bytes or str, got {type(one).__name__}")


def fatal_error(event: object) -> ErrorDetail | None:
    """Return the error that ends the response, or None for any other event, including an error in a
    single line or frame."""
    match event:
        case LineError(line=None) | FrameError(frame=None):
            return event.error
    return None


def _content(one: Input) -> dict[str, str | int | float]:
    check_input(one)
    if isinstance(one, str):
        return {"text": one}
    return {"image": b64encode(one if isinstance(one, bytes) else one.read_bytes()).decode()}


def split_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield complete lines. httpx's `iter_lines` would also split a line at U+2028.

    Raises httpx.DecodingError for a line of more than 16 MiB.
    """
    buffer = bytearray()
    for part in parts:
        *ended, rest = part.split(b"\n")
        for piece in ended:
            yield bytes(buffer + piece)
            buffer.clear()
        buffer += rest
        if len(buffer) > _MAX_LINE_BYTES:
            raise httpx.DecodingError(
                f"the server sent a line of more than {_MAX_LINE_BYTES} bytes"
            )
