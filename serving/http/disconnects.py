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
        loop, request = asyncio.get_running_loop(), asyncio.current_task()
        timer: asyncio.TimerHandle | None = None
        watcher: asyncio.Task[None] | None = None
        is_answered = has_canceled = False

        async def watch() -> None:
            nonlocal has_canceled
            while (await receive())["type"] != "http.disconnect":
                pass
            if not is_answered and request is not None:
                has_canceled = True
                request.cancel()

        def start() -> asyncio.Task[None]:
            nonlocal watcher
            watcher = watcher or asyncio.create_task(watch())
            return watcher

        async def watched_receive() -> Message:
            nonlocal timer
            if timer is not None:  # after the body
                await asyncio.shield(start())
                return {"type": "http.disconnect"}
            message = await receive()
            if not message.get("more_body", False):
                timer = loop.call_later(_WATCH_AFTER_SECONDS, start)
            return message

        async def watched_send(message: Message) -> None:
            nonlocal is_answered
            is_answered |= message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        try:
            await self._app(scope, watched_receive, watched_send)
        except asyncio.CancelledError:
            if not has_canceled:
                raise
        finally:
            for one in (timer, watcher):
                if one is not None:
                    one.cancel()
