"""Who may ask: bearer tokens, checked before a route or a body is looked at.

Open to everybody are only the paths that say nothing of the model. A browser cannot set headers on
a WebSocket; there the token may come as a subprotocol, `["kway", "bearer." + token]`.
"""

import logging
from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import error_response
from serving.tokens import Tokens

_log = logging.getLogger("kway.serving")
ANONYMOUS = "anonymous"
_SUBPROTOCOL = "kway"


class Access:
    """ASGI middleware: names the client in `request.state.client`, or refuses.

    Without `tokens` everybody is let in, as "anonymous". 401 for a missing or wrong token; 503
    while the token file cannot be read, for its old tokens may have been revoked.
    """

    def __init__(
        self, app: ASGIApp, *, tokens: Tokens | None, open_paths: Collection[str] = ()
    ) -> None:
        self._app, self._tokens, self._open_paths = app, tokens, frozenset(open_paths)
        self._told: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        client: str | Response = ANONYMOUS
        if self._tokens is not None and scope["path"] not in self._open_paths:
            client = self._client(self._tokens, scope)
        if isinstance(client, Response):
            await _refuse(client, scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), "client": client}
        await self._app(scope, receive, _choosing_subprotocol(scope, send))

    def _client(self, tokens: Tokens, scope: Scope) -> str | Response:
        """The name of the client, or the refusal."""
        token = _token(scope)
        try:
            client = tokens.client_of(token or "")
        except (OSError, ValueError) as error:
            self._tell(str(error))
            message = "the server cannot read its tokens; its log says why: try again"
            return error_response(503, "no_tokens", message, {"Retry-After": "1"})
        self._told = None
        if client is not None:
            return client
        if token is None:
            message = "this server asks for a token: send the header Authorization: Bearer TOKEN"
            return error_response(401, "no_token", message, {"WWW-Authenticate": "Bearer"})
        challenge = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
        return error_response(
            401, "wrong_token", "the token is not known to this server", challenge
        )

    def _tell(self, reason: str) -> None:
        if reason != self._told:  # once, not at every request
            self._told = reason
            _log.error("all requests are refused: %s", reason)


def document_tokens(api: FastAPI, open_paths: Collection[str]) -> None:
    """Add the tokens, and their refusals, to the OpenAPI document."""
    plain = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            document = plain()
            schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
            schemes["token"] = {"type": "http", "scheme": "bearer"}
            refusal = {"$ref": "#/components/schemas/ErrorBody"}
            described = {"content": {"application/json": {"schema": refusal}}}
            for path, methods in document["paths"].items():
                for method in methods.values() if path not in open_paths else ():
                    method["security"] = [{"token": []}]
                    for status, what in (("401", "No token, or a wrong one"), ("503", "Try again")):
                        method["responses"].setdefault(status, {"description": what, **described})
        assert api.openapi_schema is not None
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]


def _token(scope: Scope) -> str | None:
    """The bearer token of a request; None where there is none, or more than one."""
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(found) == 1:
        scheme, _, token = found[0].decode("latin-1").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else None
    offered = scope.get("subprotocols", ()) if not found else ()
    tokens = [one.removeprefix("bearer.") for one in offered if one.startswith("bearer.")]
    return tokens[0] if len(tokens) == 1 else None


def _choosing_subprotocol(scope: Scope, send: Send) -> Send:
    """A browser that offers subprotocols wants one of them back: `kway`, never the token."""
    if _SUBPROTOCOL not in scope.get("subprotocols", ()):
        return send

    async def with_subprotocol(message: Message) -> None:
        if message["type"] == "websocket.accept" and not message.get("subprotocol"):
            message = {**message, "subprotocol": _SUBPROTOCOL}
        await send(message)

    return with_subprotocol


async def _refuse(refusal: Response, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get(
        "extensions", {}
    ):
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": "no valid token"})
        return
    await refusal(scope, receive, send)
