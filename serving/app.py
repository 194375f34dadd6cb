"""The HTTP application of a replica, with all routers from `serving/http/routes/`.

To add a route, add a function to a module in `serving/http/routes/`. For a new module, also add its
router to `GROUPS`.
"""

from collections.abc import Callable
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer

from serving.config import LOOPBACK
from serving.http.entry import Entry
from serving.http.error_responses import install_handlers
from serving.http.routes import classes, galleries, inference, page, query, server
from serving.schemas import ErrorBody
from serving.tokens import Clients
from serving.versions import ServedModel

# The sections of /docs, in their order: name, description and router.
GROUPS = (
    ("Query", "Does this image or text belong to class C?", query.router),
    ("Classes", "The classes of the model.", classes.router),
    ("Galleries", "Indexed collections that can be searched for any class.", galleries.router),
    ("Open Inference Protocol", "Queries as tensors.", inference.router),
    ("Server", "The served model and the state of the server.", server.router),
)
# The paths that do not require a token, because they reveal nothing about the model. Kubernetes
# probes do not send one.
OPEN_PATHS = ("/health", "/v2/health/live", "/v2/health/ready", *page.FILES)
# Describes the token in the OpenAPI document. `Entry` checks it.
_WITH_TOKEN: dict[str, Any] = {
    "dependencies": [Depends(HTTPBearer(scheme_name="token", auto_error=False))],
    "responses": {401: {"model": ErrorBody, "description": "Token missing or invalid"}},
}


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
        openapi_tags=[{"name": name, "description": text} for name, text, _ in GROUPS],
    )
    api.state.model, api.state.metrics_page = model, metrics_page
    install_handlers(api)
    config = model.current.service.config
    has_tokens = config.token_file is not None
    api.add_middleware(
        Entry,
        model=model,
        clients=clients,
        open_paths=OPEN_PATHS,
        only_loopback=not has_tokens and config.host in LOOPBACK,
    )
    api.router.routes.append(query.DIRECT_QUERY)
    for name, _, router in GROUPS:
        api.include_router(router, tags=[name], **(_WITH_TOKEN if has_tokens else {}))
    api.include_router(server.open_router, tags=["Server"])
    api.include_router(inference.open_router, tags=["Open Inference Protocol"])
    api.include_router(page.router)
    return api
