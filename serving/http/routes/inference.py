"""The Open Inference Protocol v2 over REST. Errors have the protocol's format, `{"error": "…"}`."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel

from serving.api_error import ApiError
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
from serving.http.request_body import read_body
from serving.http.routing import ServiceDep, without_token
from serving.inference.tensors import (
    EXTENSIONS,
    PLATFORM,
    SERVER_NAME,
    InferenceModel,
    server_version,
)


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


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ProtocolError} for status in (400, 404, 408, 413, 415, 422, 429, 503)
}
_BINARY = {BINARY: {"schema": {"type": "string", "format": "binary"}}}
_BINARY_ANSWER: dict[int | str, dict[str, Any]] = {200: {"content": _BINARY}}
_NO_MODEL: dict[int | str, dict[str, Any]] = {404: {"model": ProtocolError}}
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


router = APIRouter(route_class=_ProtocolRoute)
ModelDep = Annotated[InferenceModel, Depends(_model)]


@router.get("/v2")
async def server() -> ServerMetadata:
    """Return the metadata of the server."""
    return ServerMetadata(name=SERVER_NAME, version=server_version(), extensions=list(EXTENSIONS))


# As over gRPC, these two routes do not require a token, because Kubernetes probes do not send one.
@router.get("/v2/health/live")
@without_token
async def live() -> Live:
    """Check that the server is running."""
    return Live(live=True)


@router.get("/v2/health/ready", responses={503: {"model": Ready}})
@without_token
async def ready(model: ModelDep, response: Response) -> Ready:
    """Check that the model is ready."""
    return Ready(ready=_ready(model, response))


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
    async with service.admitted(request.state.client) as progress:
        limits = service.config
        raw = await read_body(request, service, progress)
        body, inference = await service.in_thread(
            read_inference, raw, json_length, max_values(limits)
        )
        outputs, answer = await model.infer(inference)
        progress.inputs = len(answer.results)
    return response_of(name, body, outputs, answer)


def _ready(model: InferenceModel, response: Response) -> bool:
    is_ready = model.is_ready()
    response.status_code = 200 if is_ready else 503
    return is_ready
