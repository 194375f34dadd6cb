"""The HTTP application of a replica, with all routers from `serving/http/routes/`.

To add a route, add a function to a module in `serving/http/routes/`. For a new module, also add its
router to `GROUPS`. Everything else is derived: the OpenAPI document, the paths that do not require
a token, and HAProxy's rules.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from fastapi import APIRouter, FastAPI

from serving.http.access import Access
from serving.http.direct_query import DirectQuery
from serving.http.disconnects import Disconnects
from serving.http.error_responses import install_handlers
from serving.http.openapi import complete_document
from serving.http.routes import (
    classes,
    classify,
    feeds,
    galleries,
    inference,
    models,
    page,
    query,
    server,
    watches,
)
from serving.http.routing import Admin, Shared, paths_of
from serving.http.select_model import ModelResources, SelectModel
from serving.models.models import Models
from serving.tokens import Clients
from serving.watches.feed import WatchCounts
from serving.watches.watch import Watches


class Group(NamedTuple):
    """A group of routers that /docs shows as one section."""

    name: str
    description: str
    routers: tuple[APIRouter, ...]


# Listed in the order in which /docs shows the sections.
GROUPS = (
    Group("Query", "Does this image or text belong to class C?", (query.router, classify.router)),
    Group("Classes", "The classes of the model.", (classes.router,)),
    Group(
        "Watches",
        "Standing queries, and the feeds of frames on which they are evaluated.",
        (watches.router, feeds.router),
    ),
    Group(
        "Galleries",
        "Indexed collections that can be searched for any class.",
        (galleries.router,),
    ),
    Group("Open Inference Protocol", "Queries as tensors.", (inference.router,)),
    Group(
        "Server", "The served models and the state of the server.", (server.router, models.router)
    ),
)
ROUTERS = (*(router for group in GROUPS for router in group.routers), page.router)


_DESCRIPTION = (
    "Does this image or text belong to class C? Paths below /v1 use the default model of the "
    "server. Insert models/NAME to use another one, as in /v1/models/NAME/query."
)


def build_api(
    models: Models,
    clients: Clients,
    metrics: Callable[[], Awaitable[bytes]],
    watches: Watches,
    watch_counts: WatchCounts,
    admin: Admin | None = None,
) -> FastAPI:
    """Build the application for `clients`. `metrics` returns the page at /metrics; `watches` stores
    the watches of all replicas."""
    api = FastAPI(
        title="kway",
        description=_DESCRIPTION,
        docs_url=None,  # FastAPI's own pages load scripts from other hosts
        redoc_url=None,
        # Otherwise, FastAPI looks for OpenTelemetry's providers in each request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        openapi_tags=[{"name": group.name, "description": group.description} for group in GROUPS],
    )
    resources = ModelResources(Shared(models, metrics, admin, {}), watches, watch_counts)
    open_paths = paths_of(ROUTERS, lambda route: not route.needs_token)
    install_handlers(api)
    has_tokens = models.default.current.service.config.token_file is not None
    complete_document(api, open_paths=open_paths if has_tokens else None)
    api.add_middleware(DirectQuery)
    api.state.resources = resources
    api.add_middleware(SelectModel, resources=resources, models=models)
    api.add_middleware(Access, clients=clients, open_paths=open_paths)
    api.add_middleware(Disconnects)
    for group in GROUPS:
        for router in group.routers:
            api.include_router(router, tags=[group.name])
    api.include_router(page.router)
    return api
