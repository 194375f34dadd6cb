"""Selects the version of the model that answers a request."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.versions import ServedModel

# Every response of the model has this header.
HEADER = "Kway-Model-Version"
_RAW_HEADER = HEADER.lower().encode()


class CurrentVersion:
    """ASGI middleware that sets `request.state.version` and adds the version to the response."""

    def __init__(self, app: ASGIApp, *, model: ServedModel) -> None:
        self._app, self._model = app, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        state["version"] = version = self._model.current
        header = (_RAW_HEADER, version.id.encode())

        async def with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, with_version)
        finally:
            del state["version"]  # uvicorn keeps the scope until the next request of a connection
