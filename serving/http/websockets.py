"""WebSockets: JSON text messages out, errors in the one shape, then a close code.

The code is 4000 and the status of the same error over HTTP, such as 4404.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from fastapi import WebSocket, WebSocketDisconnect
from starlette.requests import ClientDisconnect
from starlette.websockets import WebSocketState

from serving.api_error import ApiError
from serving.config import ServingConfig
from serving.http.ndjson import final_error_line

_CLOSE_CODES = 4000


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
