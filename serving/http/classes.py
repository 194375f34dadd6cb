"""`GET /v1/classes` and `GET /v1/model`: what is served."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from data.config import ImageConfig
from serving.places import Places
from serving.refusals import ErrorBody
from serving.service import Service
from trainer.bundle_spec import LossSpec, Reads, TextSpec

# That run or wait; beyond it: 429.
_MAX_SEARCHES = 32


class ClassFound(BaseModel):
    id: int
    name: str
    attributes: dict[str, str]
    positives: int | None


class ClassPage(BaseModel):
    """One page of the classes that a search found; `total` counts all of them."""

    total: int
    classes: list[ClassFound]


class ClassSearch(BaseModel):
    """Which classes; a parameter that is none of these is an error, not ignored."""

    model_config = ConfigDict(extra="forbid")

    search: str = Field("", max_length=200, description="what names contain, whatever the case")
    limit: int = Field(20, ge=1, le=1000)
    offset: int = Field(0, ge=0)


class Limits(BaseModel):
    """What one request, one stream or one frame may hold."""

    max_inputs: int
    max_classes: int
    max_text_chars: int
    max_body_bytes: int
    max_pixels: int
    max_frame_bytes: int
    max_streams: int
    max_streams_per_client: int
    max_lines_in_flight: int
    stream_idle_seconds: float


class ModelInfo(BaseModel):
    """What is served."""

    bundle: str
    num_classes: int
    dim: int
    reads: Reads
    image: ImageConfig | None
    text: TextSpec | None
    loss: LossSpec
    recalls: list[float]
    engine: Literal["torch", "onnxruntime"] = Field(description="what runs the backbone")
    device: str
    limits: Limits


def class_routes(service: Service) -> APIRouter:
    """The route of searches. One runs at a time, and not where queries are prepared."""
    routes = APIRouter()
    thread, places = ThreadPoolExecutor(1, "search"), Places(_MAX_SEARCHES, "searches")

    @routes.get(
        "/v1/classes",
        response_model=ClassPage,
        responses={status: {"model": ErrorBody} for status in (422, 429)},
    )
    async def classes(asked: Annotated[ClassSearch, Query()]) -> Response:
        """Classes whose names contain `search`; those that begin with it first."""
        with places.one():
            loop = asyncio.get_running_loop()
            page = await loop.run_in_executor(thread, _page, service, asked)
        return Response(page, media_type="application/json")

    return routes


def model_routes(service: Service) -> APIRouter:
    """The route of what is served."""
    routes = APIRouter()

    @routes.get("/v1/model")
    async def model() -> ModelInfo:
        """What is served: the model's classes, preprocessing, loss and recalls."""
        return _model_info(service)

    return routes


def _page(service: Service, asked: ClassSearch) -> bytes:
    """The answer's JSON: of a thousand classes it takes long, too."""
    found, total = service.search(asked.search, limit=asked.limit, offset=asked.offset)
    page = ClassPage(total=total, classes=[_describe(service, place) for place in found])
    return page.model_dump_json().encode()


def _describe(service: Service, class_id: int) -> ClassFound:
    bundle = service.model.bundle
    entry = bundle.classes[class_id]
    positives = bundle.positives(class_id)
    return ClassFound(
        id=class_id, name=entry.name, attributes=entry.attributes, positives=positives
    )


def _model_info(service: Service) -> ModelInfo:
    bundle = service.model.bundle
    spec = bundle.spec
    return ModelInfo(
        bundle=bundle.path.name,
        num_classes=spec.num_classes,
        dim=spec.dim,
        reads=spec.reads,
        image=spec.image,
        text=spec.text,
        loss=spec.loss,
        recalls=[entry.recall for entry in spec.recalls],
        engine=service.model.engine,
        device=str(service.model.device),
        limits=Limits.model_validate(service.config, from_attributes=True),
    )
