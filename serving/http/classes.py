"""`GET /v1/classes` and `GET /v1/model`: what is served."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel

from serving.errors import ErrorBody
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


def class_routes(service: Service) -> APIRouter:
    """The routes of what is served."""
    routes = APIRouter()

    @routes.get("/v1/classes", responses={422: {"model": ErrorBody}})
    async def classes(
        search: Annotated[str, Query(max_length=200)] = "",
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
        offset: Annotated[int, Query(ge=0)] = 0,
    ) -> ClassPage:
        """Classes whose names contain `search`; those that begin with it first."""
        found, total = await asyncio.to_thread(service.search, search, limit=limit, offset=offset)
        return ClassPage(total=total, classes=[_describe(service, place) for place in found])

    @routes.get("/v1/model")
    async def model() -> ModelInfo:
        """What is served: the model's classes, preprocessing, loss and recalls."""
        return _model_info(service)

    return routes


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
