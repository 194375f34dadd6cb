"""The HTTP application of a replica: routes around a `Service`, documented at /docs."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel

from serving.clients import Clients
from serving.errors import ApiError, install_handlers
from serving.galleries.search import Galleries
from serving.http.access import Access, document_tokens
from serving.http.classes import class_routes, model_routes
from serving.http.docs import DOCS_PATHS, docs_routes
from serving.http.documented import TAGS, document_definitions, document_summaries
from serving.http.feeds import feed_routes
from serving.http.galleries import gallery_routes
from serving.http.inference import HEALTH_PATHS, inference_routes
from serving.http.page import PAGE_PATHS, page_routes
from serving.http.query import query_routes
from serving.http.stream import stream_routes
from serving.http.watches import watch_routes
from serving.refusals import ErrorBody
from serving.service import Service
from serving.watches.feed import Feeds, WatchCounts
from serving.watches.watch import Watches

# Paths that need no token: they reveal nothing about the model.
_OPEN_PATHS = ("/health", *HEALTH_PATHS, *PAGE_PATHS, *DOCS_PATHS)


class Health(BaseModel):
    status: str


def build_api(
    service: Service,
    clients: Clients,
    metrics: Callable[[], Awaitable[bytes]],
    watches: Watches,
    watch_counts: WatchCounts,
) -> FastAPI:
    """The application for `clients`; `metrics` gives the page at /metrics, `watches` are where all
    replicas have theirs."""
    api = FastAPI(
        title="kway",
        description="Is this picture, or text, of class C?",
        docs_url=None,  # those of FastAPI load their programs from elsewhere
        redoc_url=None,
        openapi_tags=TAGS,
    )
    install_handlers(api)
    document_summaries(api)
    document_definitions(api)
    if service.config.token_file is not None:
        document_tokens(api, _OPEN_PATHS)
    api.add_middleware(Access, clients=clients, open_paths=_OPEN_PATHS)
    galleries = Galleries(service.config.galleries, service.model.bundle)
    feeds = Feeds(service, watches, watch_counts)
    api.include_router(query_routes(service), tags=["Query"])
    api.include_router(stream_routes(service), tags=["Query"])
    api.include_router(class_routes(service), tags=["Classes"])
    api.include_router(watch_routes(service, watches), tags=["Watches"])
    api.include_router(feed_routes(feeds), tags=["Watches"])
    api.include_router(gallery_routes(service, galleries), tags=["Galleries"])
    api.include_router(inference_routes(service), tags=["Open Inference Protocol"])
    api.include_router(model_routes(service), tags=["Server"])
    api.include_router(page_routes())
    api.include_router(docs_routes())

    @api.get("/health", tags=["Server"], responses={503: {"model": ErrorBody}})
    async def health() -> Health:
        """Ready: the model has passed its self-check and works."""
        try:
            service.check_health()
        except RuntimeError as error:
            raise ApiError(503, "unhealthy", str(error)) from error
        return Health(status="ready")

    @api.get("/metrics", tags=["Server"], response_class=Response)
    async def counts() -> Response:
        """Prometheus metrics of the whole server."""
        return Response(await metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return api
