"""The HTTP application of a replica: routes around a `Service`, documented at /docs."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel

from serving.errors import ApiError, ErrorBody, install_handlers
from serving.http.classes import class_routes
from serving.http.query import query_routes
from serving.service import Service


class Health(BaseModel):
    status: str


def build_api(service: Service, metrics: Callable[[], Awaitable[bytes]]) -> FastAPI:
    """The application; `metrics` gives the page at /metrics."""
    api = FastAPI(title="kway", description="Is this picture, or text, of class C?", redoc_url=None)
    install_handlers(api)
    api.include_router(query_routes(service))
    api.include_router(class_routes(service))

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
