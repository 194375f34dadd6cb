"""Answers that are written line by line, each a JSON object, while their request is still open.

The framework's own streaming answer reads the request to see its client leave, and so would eat
the body of one that still comes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from serving.errors import ApiError
from serving.refusals import ErrorDetail
from serving.watches.lines import FrameError

NDJSON = "application/x-ndjson"
NDJSON_KINDS = (NDJSON, "application/ndjson", "application/jsonl")


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
                await out.line(last_words(error))
            await out.end()
        except ClientDisconnect:
            return  # there is nobody to tell


def last_words(error: ApiError) -> str:
    """Why a stream ends, as its last line."""
    detail = ErrorDetail(code=error.code, message=str(error))
    return FrameError(error=detail).model_dump_json(exclude={"frame"})


async def while_there(left: Callable[[], Awaitable[None]], work: Awaitable[None]) -> None:
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
