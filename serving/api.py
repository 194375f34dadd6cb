"""The HTTP routes of a replica: a FastAPI application around a `Service`, documented at /docs."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel

from serving.answer import Answer
from serving.bodies import QueryBody
from serving.errors import ApiError, ErrorBody, install_handlers
from serving.service import Service
from trainer.bundle_spec import ClassEntry, LossSpec, Reads, TextSpec


class ClassFound(BaseModel):
    id: int
    name: str
    attributes: dict[str, str]
    positives: int | None


class ClassPage(BaseModel):
    """One page of the classes that a search found; `total` counts all of them."""

    total: int
    classes: list[ClassFound]


class Health(BaseModel):
    status: str


class Limits(BaseModel):
    """What one request may hold."""

    max_inputs: int
    max_classes: int
    max_text_chars: int
    max_body_bytes: int


class ModelInfo(BaseModel):
    """What is served."""

    bundle: str
    num_classes: int
    dim: int
    reads: Reads
    image: dict[str, Any] | None
    text: TextSpec | None
    loss: LossSpec
    recalls: list[float]
    limits: Limits


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 404, 408, 413, 415, 422, 429, 503)
}
_QUERY_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": QueryBody.model_json_schema()},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["classes"],
                    "properties": {
                        "classes": {"type": "array", "items": {"type": "string"}},
                        "images": {
                            "type": "array",
                            "items": {"type": "string", "format": "binary"},
                        },
                        "texts": {"type": "array", "items": {"type": "string"}},
                        "recall": {"type": "number"},
                        "threshold": {"type": "number"},
                    },
                }
            },
        },
    }
}


def build_api(service: Service, metrics: Callable[[], Awaitable[bytes]]) -> FastAPI:
    """The application; `metrics` gives the page at /metrics."""
    api = FastAPI(title="kway", description="Is this picture, or text, of class C?", redoc_url=None)
    install_handlers(api)

    @api.post("/v1/query", responses=_ERRORS, openapi_extra=_QUERY_BODY)
    async def query(request: Request) -> Answer:
        """Is each picture, or text, of these classes? JSON with pictures in base64, or a form."""
        return await service.query(request)

    @api.get("/v1/classes", responses={422: {"model": ErrorBody}})
    async def classes(
        search: Annotated[str, Query(max_length=200)] = "",
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
        offset: Annotated[int, Query(ge=0)] = 0,
    ) -> ClassPage:
        """Classes whose names contain `search`; those that begin with it first."""
        found, total = await asyncio.to_thread(service.search, search, limit=limit, offset=offset)
        return ClassPage(total=total, classes=[_describe(service, place) for place in found])

    @api.get("/v1/model")
    async def model() -> ModelInfo:
        """What is served: the model's classes, preprocessing, loss and recalls."""
        return _model_info(service)

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


def _describe(service: Service, class_id: int) -> ClassFound:
    spec = service.model.bundle.spec
    entry: ClassEntry = spec.classes[class_id]
    positives = spec.thresholds.positives[class_id] if spec.thresholds is not None else None
    return ClassFound(
        id=class_id, name=entry.name, attributes=entry.attributes, positives=positives
    )


def _model_info(service: Service) -> ModelInfo:
    bundle = service.model.bundle
    spec = bundle.spec
    return ModelInfo(
        bundle=bundle.path.name,
        num_classes=len(spec.classes),
        dim=spec.dim,
        reads=spec.reads,
        image=spec.image.model_dump() if spec.image is not None else None,
        text=spec.text,
        loss=spec.loss,
        recalls=[entry.recall for entry in spec.thresholds.recalls] if spec.thresholds else [],
        limits=Limits(
            max_inputs=service.config.max_inputs,
            max_classes=service.config.max_classes,
            max_text_chars=service.config.max_text_chars,
            max_body_bytes=service.config.max_body_bytes,
        ),
    )
