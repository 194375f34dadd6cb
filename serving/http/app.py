"""The HTTP application of a replica: routes around a `Service`, documented at /docs."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel

from serving.errors import ApiError, install_handlers
from serving.galleries.search import Galleries
from serving.http.access import Access, document_tokens
from serving.http.classes import class_routes
from serving.http.docs import DOCS_PATHS, docs_routes
from serving.http.feeds import feed_routes
from serving.http.galleries import gallery_routes
from serving.http.inference import inference_routes
from serving.http.page import PAGE_PATHS, page_routes
from serving.http.query import query_routes
from serving.http.stream import stream_routes
from serving.http.watches import watch_routes
from serving.refusals import ErrorBody
from serving.service import Service
from serving.tokens import Tokens
from serving.watches.feed import Feeds, WatchCounts
from serving.watches.watch import Watches

# What says nothing of the model, and may be asked without a token.
_OPEN_PATHS = ("/health", *PAGE_PATHS, *DOCS_PATHS)


class Health(BaseModel):
    status: str


def build_api(
    service: Service,
    metrics: Callable[[], Awaitable[bytes]],
    watches: Watches,
    watch_counts: WatchCounts,
) -> FastAPI:
    """The application; `metrics` gives the page at /metrics, `watches` are where all replicas have
    theirs."""
    api = FastAPI(
        title="kway",
        description="Is this picture, or text, of class C?",
        docs_url=None,  # those of FastAPI load their programs from elsewhere
        redoc_url=None,
    )
    install_handlers(api)
    if (token_file := service.config.token_file) is not None:
        document_tokens(api, _OPEN_PATHS)
    tokens = None if token_file is None else Tokens(token_file)
    api.add_middleware(Access, tokens=tokens, open_paths=_OPEN_PATHS)
    api.include_router(query_routes(service))
    api.include_router(stream_routes(service))
    api.include_router(class_routes(service))
    galleries = Galleries(service.config.galleries, service.model.bundle)
    api.include_router(gallery_routes(service, galleries))
    api.include_router(watch_routes(service, watches))
    api.include_router(feed_routes(Feeds(service, watches, watch_counts)))
    api.include_router(inference_routes(service))
    api.include_router(page_routes())
    api.include_router(docs_routes())

    @api.get("/health", responses={503: {"model": ErrorBody}})
    async def health() -> Health:
        """Ready: the model has passed its self-check and works."""
        try:
            service.check_health()
        except RuntimeError as error:
            raise ApiError(503, "unhealthy", str(error)) from error
        return Health(status="ready")

    @api.get("/metrics", response_class=Response)
    async def counts() -> Response:
        """Prometheus metrics of the whole server."""
        return Response(await metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return api
