"""Full-duplex responses, which are written while the request is still arriving: NDJSON over HTTP,
and WebSockets.

Starlette's StreamingResponse is not used: it reads from the request to detect a disconnect, which
would consume a body that is still arriving. A WebSocket that fails is closed with code 4000 plus
the HTTP status of the error, such as 4404.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
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


def check_is_ndjson(request: Request, *, kinds: Collection[str] = NDJSON_KINDS) -> None:
    """Raise ApiError 415 if the media type is not in `kinds` or the body is compressed. Compression
    is not supported because the decompressed length of a stream is not limited."""
    kind, _ = content_type(request.headers)
    if kind not in kinds:
        message = f"Content-Type {kind[:80]!r} is not supported. Send lines of JSON as {NDJSON}"
        raise ApiError(415, "unknown_content_type", message)
    if encoding := encoding_of(request):
        message = (
            f"a stream must not have Content-Encoding {encoding[:40]!r}. Send uncompressed lines"
        )
        raise ApiError(415, "unknown_encoding", message)


async def split_lines(parts: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes | None]:
    """Yield the lines of `parts` without newlines, and None for a line of more than `limit` bytes.

    Consecutive blank lines are yielded as one item, with the newlines between them. Otherwise, a
    body of blank lines would produce millions of items and block other requests. The contents of a
    line that is too long are discarded. The last line does not need to end with a newline; it is
    omitted if it is empty.
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
        await asyncio.sleep(0)  # parts may already be buffered; let other requests run
    if buffer or is_too_long:
        yield None if is_too_long else bytes(buffer)


def count_lines(item: bytes | None) -> int:
    """Return the number of lines in an item of `split_lines`."""
    return 1 if item is None else 1 + item.count(b"\n")


class LinesOut:
    """Writes lines to the client. Raises ClientDisconnect if the client does not read them in
    time."""

    def __init__(self, send: Send, idle_seconds: float) -> None:
        self._send, self._idle_seconds = send, idle_seconds
        self.is_started = False

    async def start(self) -> None:
        """Send the status and headers. Later errors are reported in a line."""
        self.is_started = True
        headers = [(b"content-type", NDJSON.encode()), (b"cache-control", b"no-store")]
        await self._pass({"type": "http.response.start", "status": 200, "headers": headers})

    async def line(self, line: str) -> None:
        """Send a line. `line` does not include the newline."""
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
    """A response written by `work`. If `work` raises ApiError before `start`, the error becomes the
    response; otherwise it becomes the last line.

    Only `work` reads the request body.
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
            return  # there is no client to report to


def final_error_line(error: ApiError) -> str:
    """Return the last line of a stream that ends with an error."""
    detail = ErrorDetail(code=error.code, message=str(error))
    return FrameError(error=detail).model_dump_json(exclude={"frame"})


async def until_disconnect(
    disconnected: Callable[[], Awaitable[None]], work: Awaitable[None]
) -> None:
    """Run `work` until it ends or the client disconnects. Raises ClientDisconnect if `disconnected`
    returns first."""

    async def raise_on_disconnect() -> None:
        await disconnected()
        raise ClientDisconnect

    try:
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(raise_on_disconnect())
            await work
            watcher.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


class MessagesOut:
    """Writes messages to the client. Raises ClientDisconnect if the client does not read them in
    time."""

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
        # Starlette raises RuntimeError if the socket has been closed in the meantime.
        except (TimeoutError, OSError, WebSocketDisconnect, RuntimeError) as error:
            if self._socket.application_state is WebSocketState.CONNECTED and isinstance(
                error, RuntimeError
            ):
                raise
            raise ClientDisconnect from error


async def answer_socket(
    socket: WebSocket,
    config: ServingConfig,
    idle_seconds: float,
    work: Callable[[MessagesOut], Awaitable[None]],
) -> None:
    """Accept the connection, run `work`, and close the connection at the end. An ApiError is sent
    before closing."""
    await socket.accept()
    out = MessagesOut(socket, idle_seconds)
    try:
        try:
            check_origin(socket, config)
            await work(out)
            await out.end()
        except ApiError as error:
            await out.line(final_error_line(error))
            await out.end(_CLOSE_CODES + error.status)
    except ClientDisconnect:
        return  # there is no client to report to


def check_origin(socket: WebSocket, config: ServingConfig) -> None:
    """Reject cross-origin pages if the server does not require a token, because browsers allow any
    page to open a WebSocket to a server on the user's own machine."""
    origin, host = socket.headers.get("origin"), socket.headers.get("host")
    if config.token_file is None and origin is not None and urlsplit(origin).netloc != host:
        raise ApiError(
            403,
            "other_origin",
            f"pages from {origin[:200]!r} are not allowed to connect to {host!r}. Open the page "
            "from this server, or start the server with --token-file",
        )


async def wait_for_close(socket: WebSocket) -> None:
    """Return once the client has closed the connection. Messages from the client are discarded."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
