"""Cancels requests whose clients have disconnected, so that the model does not compute their
answers."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Most requests are answered sooner. For these, watching the connection would cost more CPU time
# than the answers that it saves.
_WATCH_AFTER_SECONDS = 0.5


class Disconnects:
    """ASGI middleware that cancels the task of an HTTP request if the client disconnects after it
    has sent the body. While the body is arriving, the application detects this itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        watch = _Watch(receive, send)
        try:
            await self._app(scope, watch.receive, watch.send)
        except asyncio.CancelledError:
            if not watch.has_canceled:
                raise
        finally:
            watch.stop()


class _Watch:
    """The connection of a request. Create it in the task of the request."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._request = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_answered = False
        self.has_canceled = False

    async def receive(self) -> Message:
        if self._timer is not None:  # after the body
            await asyncio.shield(self._start())
            return {"type": "http.disconnect"}
        message = await self._receive()
        if not message.get("more_body", False):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_WATCH_AFTER_SECONDS, self._start)
        return message

    async def send(self, message: Message) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        self._is_answered |= is_last
        await self._send(message)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()

    def _start(self) -> asyncio.Task[None]:
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._wait())
        return self._watcher

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._is_answered and self._request is not None:
            self.has_canceled = True
            self._request.cancel()
