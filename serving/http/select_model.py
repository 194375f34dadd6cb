"""Selects the model, and the version of it, that answers a request.

The path /v1/models/NAME/query is the path /v1/query of the model NAME, and so on for all other
paths below /v1. /v1/models/NAME itself is /v1/model. The paths /v2/models/NAME/… of the Open
Inference Protocol contain the name, too. All other paths are those of the default model.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api_error import ApiError
from serving.http.error_responses import reject
from serving.http.routing import Resources, Shared
from serving.models.models import Models, ServedModel
from serving.watches.feed import Feeds, WatchCounts
from serving.watches.of_model import ModelWatches
from serving.watches.watch import Watches

# The response to every request that reaches a model has this header.
HEADER = "Kway-Model-Version"
_RAW_HEADER = HEADER.lower().encode()
_PATH = re.compile(r"/v([12])/models/([^/]+)(/.*)?", re.DOTALL)
_STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")


class _OfModel(NamedTuple):
    """What remains the same for all versions of a model."""

    model: ServedModel
    watches: Watches
    feeds: Feeds


class ModelResources:
    """The resources of all models of a replica."""

    def __init__(self, shared: Shared, watches: Watches, watch_counts: WatchCounts) -> None:
        self._shared, self._watch_counts = shared, watch_counts
        default = shared.models.default
        self._models: Mapping[str, _OfModel] = {
            model.name: self._of_model(
                model, ModelWatches(watches, None if model is default else model.name)
            )
            for model in shared.models
        }

    def of(self, name: str | None = None) -> Resources:
        """Return the resources of the current version of a model, by default the default model.
        Raises ApiError 404 if it does not exist."""
        models = self._shared.models
        model, watches, feeds = self._models[(models[name] if name else models.default).name]
        return Resources(self._shared, model.current, watches, feeds)

    def _of_model(self, model: ServedModel, watches: Watches) -> _OfModel:
        feeds = Feeds(lambda: model.current.service, watches, self._watch_counts)
        return _OfModel(model, watches, feeds)


class SelectModel:
    """ASGI middleware that sets `request.state.resources` and adds the version to the response."""

    def __init__(self, app: ASGIApp, *, resources: ModelResources, models: Models) -> None:
        self._app, self._resources, self._models = app, resources, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        name, scope = self._selected(scope)
        try:
            resources = self._resources.of(name)
        except ApiError as error:
            await reject(error, scope, receive, send)
            return
        scope["state"]["resources"] = resources
        header = (_RAW_HEADER, resources.version.id.encode())

        async def with_version(message: Message) -> None:
            if message["type"] in _STARTS:
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, with_version)
        finally:
            resources.release()  # uvicorn keeps the scope until the next request of a connection

    def _selected(self, scope: Scope) -> tuple[str | None, Scope]:
        """Return the name of the model, None for the default model, and the scope with the path of
        the route."""
        found = _PATH.fullmatch(scope["path"])
        if found is None:
            return None, scope
        protocol, name, rest = found.groups()
        if protocol == "2":  # the routes reject an unknown model in the protocol's format
            return name if name in self._models else None, scope
        path = f"/v1{rest}" if rest else "/v1/model"
        return name, {**scope, "path": path, "raw_path": path.encode()}
