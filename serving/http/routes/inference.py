"""The Open Inference Protocol v2 over REST. Errors have the protocol's format, `{"error": "…"}`."""

from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field

from serving.api_error import ApiError, validated
from serving.http.inference_body import (
    BINARY,
    HEADER,
    InferenceRequest,
    InferenceResponse,
    read_inference,
    response_of,
)
from serving.http.openapi import request_body
from serving.http.query_body import max_values
from serving.http.request_body import bounded_parts, parse_json, read_body
from serving.http.routing import ResourcesDep, ServiceDep, facts
from serving.inference.model_config import PLATFORM, ModelConfig, ModelIndex
from serving.inference.models import InferenceModels
from serving.inference.statistics import StatisticsResponse
from serving.inference.tensors import EXTENSIONS, SERVER_NAME, InferenceModel, server_version


class ProtocolError(BaseModel):
    error: str


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    ready: bool


class ModelReady(BaseModel):
    name: str
    ready: bool


class TensorMetadata(BaseModel):
    """Metadata of an input or output tensor. A dimension of -1 is variable."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    name: str
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class IndexRequest(BaseModel):
    ready: bool = Field(False, description="list only models that are ready")


_MAX_INDEX_BYTES = 1000
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ProtocolError} for status in (400, 404, 408, 413, 415, 422, 429, 503)
}
_BINARY = {BINARY: {"schema": {"type": "string", "format": "binary"}}}
_BINARY_ANSWER: dict[int | str, dict[str, Any]] = {200: {"content": _BINARY}}
_NO_MODEL: dict[int | str, dict[str, Any]] = {404: {"model": ProtocolError}}
_INDEX_BODY = request_body(IndexRequest)
_INDEX_BODY["requestBody"]["required"] = False
_BODY = request_body(InferenceRequest)
_BODY["requestBody"]["content"] |= _BINARY


class _ProtocolRoute(APIRoute):
    """A route whose errors have the protocol's format, `{"error": "…"}`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handle(request)
            except ApiError as error:
                content = {"error": str(error)}
                return JSONResponse(content, status_code=error.status, headers=error.headers)

        return answered


async def _model(service: ServiceDep) -> InferenceModel:
    return InferenceModel(service)


async def _models(resources: ResourcesDep) -> InferenceModels:
    return InferenceModels(resources.shared.models, resources.shared.metrics)


router = APIRouter(route_class=_ProtocolRoute)
ModelDep = Annotated[InferenceModel, Depends(_model)]
ModelsDep = Annotated[InferenceModels, Depends(_models)]


@router.get("/v2")
async def server() -> ServerMetadata:
    """Return the metadata of the server."""
    return ServerMetadata(name=SERVER_NAME, version=server_version(), extensions=list(EXTENSIONS))


# As over gRPC, these two routes do not require a token, because Kubernetes probes do not send one.
@router.get("/v2/health/live")
@facts(needs_token=False)
async def live() -> Live:
    """Check that the server is running."""
    return Live(live=True)


@router.get("/v2/health/ready", responses={503: {"model": Ready}})
@facts(needs_token=False)
async def ready(models: ModelsDep, response: Response) -> Ready:
    """Check that all models are ready."""
    return Ready(ready=_ready(models, response))


@router.post("/v2/repository/index", responses=_ERRORS, openapi_extra=_INDEX_BODY)
async def index(request: Request, service: ServiceDep, models: ModelsDep) -> list[ModelIndex]:
    """Return the names and states of the served models."""
    async with aclosing(bounded_parts(request, _MAX_INDEX_BYTES, service.uploads)) as parts:
        raw = b"".join([part async for part in parts])
    body = parse_json(raw or b"{}")
    return models.index(
        only_ready=validated(IndexRequest, body, "invalid_inference", status=400).ready
    )


@router.get("/v2/models/stats")
async def all_statistics(models: ModelsDep) -> StatisticsResponse:
    """Return the statistics of all models."""
    return StatisticsResponse(model_stats=await models.statistics())


@router.get("/v2/models/{name}", responses=_NO_MODEL)
async def metadata(name: str, model: ModelDep) -> ModelMetadata:
    """Return the inputs and outputs of the model."""
    model.check(name, "")
    inputs, outputs = (
        [TensorMetadata(name=t.name, datatype=t.datatype, shape=list(t.shape)) for t in tensors]
        for tensors in (model.inputs, model.outputs)
    )
    return ModelMetadata(name=name, platform=PLATFORM, inputs=inputs, outputs=outputs)


@router.get("/v2/models/{name}/ready", responses=_NO_MODEL | {503: {"model": ModelReady}})
async def model_ready(name: str, model: ModelDep, response: Response) -> ModelReady:
    """Check that the model is ready."""
    model.check(name, "")
    return ModelReady(name=name, ready=_ready(model, response))


@router.get("/v2/models/{name}/config", responses=_NO_MODEL)
async def config(name: str, model: ModelDep) -> ModelConfig:
    """Return the configuration of the model."""
    model.check(name, "")
    return model.config()


@router.get("/v2/models/{name}/stats", responses=_NO_MODEL)
async def statistics(name: str, models: ModelsDep) -> StatisticsResponse:
    """Return counts and durations of the requests to the model."""
    models.named(name)
    return StatisticsResponse(model_stats=await models.statistics(name))


@router.api_route(
    "/v2/models/{name}/versions/{version:path}", methods=["GET", "POST"], include_in_schema=False
)
async def versioned(name: str, version: str, model: ModelDep) -> None:
    """Reject requests for a version."""
    model.check(name, version.partition("/")[0] or "/")


@router.post(
    "/v2/models/{name}/infer",
    response_model=InferenceResponse,
    responses=_ERRORS | _BINARY_ANSWER,
    openapi_extra=_BODY,
)
async def infer(
    name: str,
    request: Request,
    service: ServiceDep,
    model: ModelDep,
    json_length: Annotated[
        str | None,
        Header(
            alias=HEADER, description="length in bytes of the JSON that precedes the binary tensors"
        ),
    ] = None,
) -> Response:
    """Compute scores of images or texts for the classes in `class_ids` or `classes`."""
    model.check(name, "")
    async with service.admitted(request.state.limit_key) as progress:
        limits = service.config
        raw = await read_body(request, limits.max_body_bytes, service, progress)
        body, inference = await service.in_thread(
            read_inference, raw, json_length, max_values(limits)
        )
        outputs, answer = await model.infer(inference)
        progress.inputs = len(answer.results)
    return response_of(name, body, outputs, answer)


def _ready(model: InferenceModel | InferenceModels, response: Response) -> bool:
    is_ready = model.is_ready()
    response.status_code = 200 if is_ready else 503
    return is_ready
