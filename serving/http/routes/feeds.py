"""Feeds: `POST /v1/feeds/{feed}` with lines, and the WebSocket `/v1/feeds/{feed}/frames`. Clients
send frames and receive hits."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request, WebSocket
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, RootModel
from starlette.requests import ClientDisconnect

from serving.api_error import ApiError, validated, watches_down
from serving.http.input_lines import FrameIn, frame_of_bytes, frame_of_json, max_json_bytes
from serving.http.openapi import NdjsonSchema, error_responses, request_body
from serving.http.routing import Resources, ResourcesDep, facts, per_application
from serving.http.streams import (
    NDJSON,
    LinesOut,
    MessagesOut,
    NdjsonAnswer,
    answer_socket,
    check_is_ndjson,
    split_lines,
)
from serving.limits import ClientLimit
from serving.watches.feed import Feed, Feeds, Frame
from serving.watches.schemas import (
    Acknowledged,
    Dropped,
    FeedDone,
    FeedPosition,
    FrameError,
    WatchHit,
)
from serving.watches.watch import FeedName, WatchesDownError

T = TypeVar("T")


class FeedParameters(BaseModel):
    """Options for processing the frames of a feed."""

    model_config = ConfigDict(extra="forbid")

    latest: bool = Field(
        False,
        description="skip a frame if a newer one has arrived, and report how many were dropped",
    )
    acknowledge: bool = Field(False, description="send a line for every frame, after its hits")


class _FeedPath(BaseModel):
    feed: FeedName


class FeedLine(RootModel[WatchHit | FrameError | Acknowledged | Dropped | FeedDone]):
    """One line of the response."""


router = APIRouter()


def _limit(resources: Resources) -> ClientLimit:
    config = resources.service.config
    return ClientLimit(config.max_feeds, "feeds", per_client=config.max_feeds_per_client)


LimitDep = Annotated[ClientLimit, Depends(per_application(_limit))]


@router.post(
    "/v1/feeds/{feed}",
    response_class=NdjsonSchema,
    responses={
        200: {"model": FeedLine, "description": "one line per hit, and a last line with counts"},
        **error_responses(400, 415, 422, 429),
    },
    openapi_extra=request_body(FrameIn, NDJSON),
)
@facts(streams=True)
async def send(
    request: Request,
    feed: Annotated[FeedName, Path()],
    parameters: Annotated[FeedParameters, Query()],
    resources: ResourcesDep,
    limit: LimitDep,
) -> Response:
    """Send frames as lines and receive the hits of your watches.

    Hits are returned while you are still sending frames. Read the response as you send: if you do
    not, the server stops reading your frames.
    """
    check_is_ndjson(request)
    feeds = resources.feeds
    resources.release()  # each frame takes the version that is current

    async def work(request: Request, out: LinesOut) -> None:
        async with _followed(feeds, limit, request.state.limit_key):
            await out.start()
            run = _feed(feeds, feed, request.state.client, parameters, out.line)
            await run(frames_of_lines(request.stream(), feeds), latest=parameters.latest)

    return NdjsonAnswer(work, idle_seconds=feeds.config.feed_idle_seconds)


@router.get("/v1/feeds/{feed}", responses=error_responses(422, 503))
async def position(
    request: Request, feed: Annotated[FeedName, Path()], resources: ResourcesDep
) -> FeedPosition:
    """Return the id of the last answered frame that you sent to a feed.

    After a lost connection, send the frames after it.
    """
    try:
        frame = await resources.watches.position(request.state.client, feed)
    except WatchesDownError as error:
        raise watches_down(error) from error
    return FeedPosition(feed=feed, frame=frame)


@router.websocket("/v1/feeds/{feed}/frames")
@facts(streams=True)
async def connect(socket: WebSocket, feed: str, resources: ResourcesDep, limit: LimitDep) -> None:
    """Send frames as WebSocket messages: the bytes of an image, or the JSON of a line as text."""
    feeds, config = resources.feeds, resources.feeds.config
    resources.release()  # each frame takes the version that is current

    async def work(out: MessagesOut) -> None:
        name = validated(_FeedPath, {"feed": feed}, "invalid_parameter").feed
        parameters = validated(FeedParameters, dict(socket.query_params), "invalid_parameter")
        async with _followed(feeds, limit, socket.state.limit_key):
            run = _feed(feeds, name, socket.state.client, parameters, out.line)
            await run(frames_of_messages(socket, feeds), latest=parameters.latest)

    await answer_socket(socket, config, config.feed_idle_seconds, work)


async def frames_of_lines(body: AsyncIterator[bytes], feeds: Feeds) -> AsyncIterator[Frame]:
    """Yield the frames in a body. Empty lines are skipped, but they keep the feed alive.

    Raises ApiError if no line arrives for too long.
    """
    config, reads = feeds.config, feeds.service.model.reads
    lines, position = split_lines(body, max_json_bytes(config)), 0
    while True:
        try:
            raw = await _within_idle_timeout(anext(lines), config.feed_idle_seconds)
        except StopAsyncIteration:
            return
        if raw is None or raw.strip():
            yield await feeds.service.in_thread(frame_of_json, raw, position, reads, config)
            position += 1


async def frames_of_messages(socket: WebSocket, feeds: Feeds) -> AsyncIterator[Frame]:
    """Yield the frames in WebSocket messages. Empty messages are skipped. Raises ApiError if no
    message arrives for too long."""
    config, reads = feeds.config, feeds.service.model.reads
    most, position = max_json_bytes(config), 0
    while True:
        message = await _within_idle_timeout(socket.receive(), config.feed_idle_seconds)
        if message["type"] == "websocket.disconnect":
            raise ClientDisconnect
        if raw := message.get("bytes"):
            yield frame_of_bytes(raw, position, reads, config)
        elif text := message.get("text"):
            raw = text.encode() if len(text) <= most else None
            yield await feeds.service.in_thread(frame_of_json, raw, position, reads, config)
        else:
            continue
        position += 1


def _feed(
    feeds: Feeds,
    name: str,
    client: str,
    parameters: FeedParameters,
    line: Callable[[str], Awaitable[None]],
) -> Callable[..., Awaitable[None]]:
    async def write(event: BaseModel) -> None:
        await line(event.model_dump_json(by_alias=True))

    return Feed(
        feeds, name=name, client=client, is_acknowledged=parameters.acknowledge, write=write
    ).run


async def _within_idle_timeout(awaitable: Awaitable[T], seconds: float) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except TimeoutError as error:
        message = f"no frame arrived within {seconds:g} s. Send empty lines to keep the feed open"
        raise ApiError(408, "idle", message) from error


@asynccontextmanager
async def _followed(feeds: Feeds, limit: ClientLimit, client: str) -> AsyncIterator[None]:
    """Acquire one of the client's feed slots and keep the local copy of the watches up to date.
    Raises ApiError if no slot is free or the watches are unavailable."""
    with limit.slot(client):
        try:
            async with feeds.live.followed():
                yield
        except WatchesDownError as error:
            raise watches_down(error) from error
