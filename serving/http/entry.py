"""What every HTTP request passes before its route: its host name and its token are checked, and it
gets the version of the model that answers it.

Every path requires a token, except those that reveal nothing about the model. Without tokens, a
server is protected only by its loopback address. A web page that the user visits could send it
requests under a host name that resolves to loopback, so it accepts only loopback names.
"""

import re
from collections.abc import Collection
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api_error import ApiError
from serving.config import LOOPBACK
from serving.http.error_responses import response_of
from serving.service import Service
from serving.tokens import ANONYMOUS, Clients
from serving.versions import ServedModel, Version

# Every response of the model has this header.
_VERSION_HEADER = b"kway-model-version"


class Entry:
    """ASGI middleware that sets `request.state.client`, to which limits per client apply, and
    `request.state.version`, and adds the version to the response; or rejects the request.

    It responds with status 400 to another host name than those of a loopback address if
    `only_loopback`, with 401 if the token is missing or wrong, and with 503 while the token file
    cannot be read, because the tokens read earlier may have been revoked.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        model: ServedModel,
        clients: Clients,
        open_paths: Collection[str],
        only_loopback: bool,
    ) -> None:
        self._app, self._model, self._clients = app, model, clients
        self._open_paths, self._only_loopback = open_paths, only_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            client = self._client(scope)
        except ApiError as error:
            await response_of(error)(scope, receive, send)
            return
        version = self._model.current
        scope["state"] = {**scope.get("state", {}), "client": client, "version": version}
        header = (_VERSION_HEADER, version.service.version.encode())

        async def with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, with_version)
        finally:
            # uvicorn keeps the scope until the next request of a connection.
            del scope["state"]["version"]

    def _client(self, scope: Scope) -> str:
        """Return the client of a request. Raises ApiError if the request is rejected."""

        def values(wanted: bytes) -> list[str]:
            return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]

        if self._only_loopback:
            _check_host(values(b"host"))
        address = scope["client"][0] if scope.get("client") else ANONYMOUS
        if scope["path"] in self._open_paths:
            return address
        return self._clients.client_of(values(b"authorization"), address)


def _check_host(found: list[str]) -> None:
    host = found[0] if len(found) == 1 else ""
    without_port = host.rpartition(":")[0] if re.search(r":[0-9]*$", host) else host
    name = without_port.strip("[]").lower()
    if name not in LOOPBACK:
        message = (
            f"this server accepts requests for {', '.join(LOOPBACK)}, not for {name[:80]!r}. "
            "Start it with --token-file to use other host names"
        )
        raise ApiError(400, "wrong_host", message)


# Dependencies of route functions. They are coroutines, because FastAPI runs plain functions in a
# thread.
async def _version(request: Request) -> Version:
    found: Version = request.state.version
    return found


async def _service(version: Annotated[Version, Depends(_version)]) -> Service:
    return version.service


VersionDep = Annotated[Version, Depends(_version)]
ServiceDep = Annotated[Service, Depends(_service)]
