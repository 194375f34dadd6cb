"""The HTTP application of a replica, with all routers from `serving/http/routes/`.

To add a route, add a function to a module in `serving/http/routes/`. For a new module, also add its
router to `GROUPS`. The OpenAPI document and the paths that do not require a token are derived from
the routes.
"""

from collections.abc import Callable
from typing import NamedTuple

from fastapi import APIRouter, FastAPI

from serving.config import LOOPBACK
from serving.http.access import Access, LoopbackHost
from serving.http.current_version import CurrentVersion
from serving.http.direct_query import DirectQuery
from serving.http.disconnects import Disconnects
from serving.http.error_responses import install_handlers
from serving.http.openapi import complete_document
from serving.http.routes import (
    classes,
    classify,
    galleries,
    inference,
    page,
    query,
    server,
)
from serving.http.routing import paths_without_token
from serving.tokens import Clients
from serving.versions import ServedModel


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
        "Galleries",
        "Indexed collections that can be searched for any class.",
        (galleries.router,),
    ),
    Group("Open Inference Protocol", "Queries as tensors.", (inference.router,)),
    Group("Server", "The served model and the state of the server.", (server.router,)),
)
ROUTERS = (*(router for group in GROUPS for router in group.routers), page.router)


def build_app(
    model: ServedModel, clients: Clients, metrics_page: Callable[[], bytes] | None = None
) -> FastAPI:
    """Build the application for `clients`. `metrics_page` returns the page at /metrics; None if the
    metrics are exported elsewhere."""
    api = FastAPI(
        title="kway",
        description="Does this image or text belong to class C?",
        docs_url=None,  # FastAPI's own pages load scripts from other hosts
        redoc_url=None,
        # Otherwise, FastAPI looks for OpenTelemetry's providers in each request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        openapi_tags=[{"name": group.name, "description": group.description} for group in GROUPS],
    )
    api.state.model, api.state.metrics_page = model, metrics_page
    api.state.searches = classes.Searches()
    open_paths = paths_without_token(ROUTERS)
    install_handlers(api)
    config = model.current.service.config
    has_tokens = config.token_file is not None
    complete_document(api, open_paths=open_paths if has_tokens else None)
    api.add_middleware(DirectQuery)
    api.add_middleware(CurrentVersion, model=model)
    api.add_middleware(Access, clients=clients, open_paths=open_paths)
    api.add_middleware(Disconnects)
    if not has_tokens and config.host in LOOPBACK:
        api.add_middleware(LoopbackHost)
    for group in GROUPS:
        for router in group.routers:
            api.include_router(router, tags=[group.name])
    api.include_router(page.router)
    return api
