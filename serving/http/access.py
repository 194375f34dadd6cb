"""Authentication by bearer token, checked before the route and the body.

Every path requires a token, except those that reveal nothing about the model. Without tokens, a
server is protected only by its loopback address. A web page that the user visits could send it
requests under a host name that resolves to loopback, so it accepts only loopback names
(`LoopbackHost`).
"""

import re
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api_error import ApiError
from serving.config import LOOPBACK
from serving.http.error_responses import reject
from serving.tokens import Clients, address_key, bearer_token


class Access:
    """ASGI middleware that sets `request.state.client`, to which limits per client apply, or
    rejects the request.

    It responds with status 401 if the token is missing or wrong, and with 503 while the token file
    cannot be read, because the tokens read earlier may have been revoked.
    """

    def __init__(self, app: ASGIApp, *, clients: Clients, open_paths: Collection[str] = ()) -> None:
        self._app, self._clients = app, clients
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        addresses = self._addresses(scope)
        try:
            if scope["path"] in self._open_paths:
                client = address_key(addresses)
            else:
                client = self._clients.client_of(_token(scope), addresses)
        except ApiError as error:
            await reject(error, scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), "client": client}
        await self._app(scope, receive, send)

    def _addresses(self, scope: Scope) -> list[str]:
        """Return the client's address, or the values of the header that contains it."""
        if self._clients.address_header is None:
            return [scope["client"][0]] if scope.get("client") else []
        wanted = self._clients.address_header.encode()
        return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


class LoopbackHost:
    """ASGI middleware that responds with status 400 to a request for another host than a loopback
    address."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (host := _host(scope)) not in LOOPBACK:
            message = (
                f"this server accepts requests for {', '.join(LOOPBACK)}, not for {host[:80]!r}. "
                "Start it with --token-file to use other host names"
            )
            await reject(ApiError(400, "wrong_host", message), scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _host(scope: Scope) -> str:
    """Return the host name of a request without the port."""
    found = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    host = found[0] if len(found) == 1 else ""
    without_port = host.rpartition(":")[0] if re.search(r":[0-9]*$", host) else host
    return without_port.strip("[]").lower()


def _token(scope: Scope) -> str | None:
    """Return the bearer token of a request, or None if there is not exactly one."""
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    return bearer_token(found[0].decode("latin-1")) if len(found) == 1 else None
