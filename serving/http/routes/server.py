"""`/v1/model`, `/health` and `/metrics`: the served model and the state of the server."""

from collections.abc import Callable
from typing import Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel, Field

from data.images.config import ImageConfig
from serving.api_error import ApiError
from serving.http.entry import ServiceDep
from serving.schemas import ErrorBody, Limits, ModelLogits
from serving.service import HUNG_SECONDS
from trainer.backbone.config import Precision
from trainer.bundle.spec import LossSpec, Reads, TextSpec


class ModelInfo(BaseModel):
    """The served model."""

    name: str = Field(description="name of the model in /v2/models/NAME")
    version: str = Field(description="identifies the contents of the bundle")
    bundle: str = Field(description="name of the bundle's folder")
    num_classes: int
    dim: int
    reads: Reads
    image: ImageConfig | None
    text: TextSpec | None
    logits: ModelLogits
    loss: LossSpec
    recalls: list[float]
    precision: Precision = Field(
        description="precision in which the backbone runs and the thresholds were set"
    )
    engine: Literal["torch", "onnxruntime"] = Field(description="library that runs the backbone")
    device: str
    limits: Limits


router, open_router = APIRouter(), APIRouter()


@router.get("/v1/model")
async def info(service: ServiceDep) -> ModelInfo:
    """Return the properties of the model and the limits of the server."""
    bundle = service.model.bundle
    spec = bundle.spec
    # Without margins and priors, which apply only in training.
    logits = spec.logits.evaluated(scale=spec.logits.scale, offset=spec.logits.offset)
    return ModelInfo(
        name=service.name,
        version=service.version,
        bundle=bundle.path.name,
        num_classes=spec.num_classes,
        dim=spec.dim,
        reads=spec.reads,
        image=spec.image,
        text=spec.text,
        logits=ModelLogits.model_validate(logits, from_attributes=True),
        loss=spec.loss,
        recalls=[entry.recall for entry in spec.recalls],
        precision=spec.precision,
        engine=service.model.engine,
        device=str(service.model.device),
        limits=Limits.model_validate(service.config, from_attributes=True),
    )


@open_router.get("/health", responses={503: {"model": ErrorBody}})
async def health(service: ServiceDep) -> dict[str, str]:
    """Check that the server is ready: the model has passed its self-check and responds."""
    if not service.is_healthy():
        message = f"a forward pass has been running for more than {HUNG_SECONDS:.0f} s"
        raise ApiError(503, "unhealthy", message)
    return {"status": "ready"}


@router.get("/metrics", response_class=Response, responses={404: {"model": ErrorBody}})
async def metrics(request: Request) -> Response:
    """Return Prometheus metrics. Ray exports the metrics of its replicas on a port of its own."""
    page: Callable[[], bytes] | None = request.app.state.metrics_page
    if page is None:
        message = "Ray exports the metrics of this server. Scrape the metrics port of each Ray node"
        raise ApiError(404, "metrics_of_ray", message)
    return Response(page(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
