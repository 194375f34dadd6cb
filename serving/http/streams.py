"""Bodies and answers that are open at once: lines of JSON over HTTP, messages over WebSockets.

Starlette's streaming response reads the request to notice a disconnect, and would consume the body
of one that is still arriving. A WebSocket that ends with an error is closed with code 4000 + the
status of that error over HTTP, such as 4404.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request, WebSocket, WebSocketDisconnect
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketState

from serving.api_error import ApiError
from serving.config import ServingConfig
from serving.http.request_body import content_type, encoding_of
from serving.schemas import ErrorDetail
from serving.watches.schemas import FrameError

_BLANK = re.compile(rb"\s*\n")
NDJSON = "application/x-ndjson"
NDJSON_KINDS = (NDJSON, "application/ndjson", "application/jsonl")
_CLOSE_CODES = 4000


def check_is_lines(request: Request, *, kinds: Collection[str] = NDJSON_KINDS) -> None:
    """Raise ApiError 415 for a body of another media type than `kinds`, or a compressed one: the
    decompressed length of a stream has no limit."""
    kind, _ = content_type(request.headers)
    if kind not in kinds:
        message = f"send lines of JSON as {NDJSON}, not {kind[:80]!r}"
        raise ApiError(415, "unknown_content_type", message)
    if encoding := encoding_of(request):
        message = f"lines must not be compressed: remove Content-Encoding {encoding[:40]}"
        raise ApiError(415, "unknown_encoding", message)


async def split_lines(parts: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes | None]:
    """The lines of `parts` without their ends; None in place of one of more than `limit` bytes.

    Blank lines that come together are one item, in which their ends stand between them: a body of
    them alone would else be millions of items, and hold up all others. Of a line that is too long
    nothing more is kept. The last one needs no end; an empty last one is none.
    """
    buffer = bytearray()
    is_too_long = False
    async for part in parts:
        start = 0
        while start < len(part):
            is_new = not buffer and not is_too_long
            if is_new and (blank := _BLANK.match(part, start, start + limit)):
                yield part[start : blank.end() - 1]
                start = blank.end()
                continue
            end = part.find(b"\n", start)
            buffer += part[start : len(part) if end < 0 else end]
            if is_too_long or len(buffer) > limit:
                buffer, is_too_long = bytearray(), True
            if end < 0:
                break
            yield None if is_too_long else bytes(buffer)
            buffer, is_too_long = bytearray(), False
            start = end + 1
        await asyncio.sleep(0)  # parts may be there already: others have their turn
    if buffer or is_too_long:
        yield None if is_too_long else bytes(buffer)


def count_lines(item: bytes | None) -> int:
    """How many lines an item of `split_lines` stands for."""
    return 1 if item is None else 1 + item.count(b"\n")


class LinesOut:
    """Lines to the client, who has to read them. Raises ClientDisconnect where it does not."""

    def __init__(self, send: Send, idle_seconds: float) -> None:
        self._send, self._idle_seconds = send, idle_seconds
        self.is_started = False

    async def start(self) -> None:
        """Send the head: from here on what goes wrong is told in a line."""
        self.is_started = True
        headers = [(b"content-type", NDJSON.encode()), (b"cache-control", b"no-store")]
        await self._pass({"type": "http.response.start", "status": 200, "headers": headers})

    async def line(self, line: str) -> None:
        """Send a line, without its end."""
        body = line.encode() + b"\n"
        await self._pass({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        await self._pass({"type": "http.response.body", "body": b""})

    async def _pass(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._idle_seconds):
                await self._send(message)
        except (TimeoutError, OSError) as error:
            raise ClientDisconnect from error


class NdjsonAnswer(Response):
    """What `work` writes. Its ApiError is the answer before `start`, and the last line after it.

    It does not read the request, unless `work` does.
    """

    media_type = NDJSON

    def __init__(
        self, work: Callable[[Request, LinesOut], Awaitable[None]], *, idle_seconds: float
    ) -> None:
        super().__init__()
        self._work, self._idle_seconds = work, idle_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = LinesOut(send, self._idle_seconds)
        try:
            try:
                await self._work(Request(scope, receive), out)
            except ApiError as error:
                if not out.is_started:
                    raise
                await out.line(final_error_line(error))
            await out.end()
        except ClientDisconnect:
            return  # there is nobody to tell


def final_error_line(error: ApiError) -> str:
    """Why a stream ends, as its last line."""
    detail = ErrorDetail(code=error.code, message=str(error))
    return FrameError(error=detail).model_dump_json(exclude={"frame"})


async def until_disconnect(left: Callable[[], Awaitable[None]], work: Awaitable[None]) -> None:
    """Do `work`, unless the client leaves first: ClientDisconnect once `left` returns."""

    async def leave() -> None:
        await left()
        raise ClientDisconnect

    try:
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(leave())
            await work
            watcher.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


class MessagesOut:
    """Messages to the client, who has to read them. Raises ClientDisconnect where it does not."""

    def __init__(self, socket: WebSocket, idle_seconds: float) -> None:
        self._socket, self._idle_seconds = socket, idle_seconds

    async def line(self, line: str) -> None:
        await self._pass(self._socket.send_text(line))

    async def end(self, code: int = 1000) -> None:
        await self._pass(self._socket.close(code))

    async def _pass(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._idle_seconds):
                await sending
        # RuntimeError: starlette's, for a socket that was closed meanwhile.
        except (TimeoutError, OSError, WebSocketDisconnect, RuntimeError) as error:
            if self._socket.application_state is WebSocketState.CONNECTED and isinstance(
                error, RuntimeError
            ):
                raise
            raise ClientDisconnect from error


@asynccontextmanager
async def accepted(
    socket: WebSocket, config: ServingConfig, idle_seconds: float
) -> AsyncIterator[MessagesOut]:
    """Accept the connection and close it at the end; an ApiError is told first."""
    await socket.accept()
    out = MessagesOut(socket, idle_seconds)
    try:
        try:
            check_origin(socket, config)
            yield out
            await out.end()
        except ApiError as error:
            await out.line(final_error_line(error))
            await out.end(_CLOSE_CODES + error.status)
    except ClientDisconnect:
        return  # there is nobody to tell


def check_origin(socket: WebSocket, config: ServingConfig) -> None:
    """Refuse another site's page where no token protects the server: browsers let any page connect
    to a WebSocket on its visitor's own machine."""
    origin, host = socket.headers.get("origin"), socket.headers.get("host")
    if config.token_file is None and origin is not None and urlsplit(origin).netloc != host:
        raise ApiError(
            403, "other_origin", f"a page of {origin[:200]!r} may not connect to {host!r}"
        )


async def wait_for_close(socket: WebSocket) -> None:
    """Return once the client has closed the connection; what it sends is thrown away."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
