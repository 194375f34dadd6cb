"""The Open Inference Protocol v2 over REST; its errors have the protocol's shape, a string."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import (
    BaseModel,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)

from serving.errors import ApiError, invalid
from serving.http.bodies import most_values, whole_body
from serving.http.documented import request_body
from serving.http.encoded import picture_bytes
from serving.http.strict_json import parse_json
from serving.inference.model import PLATFORM, SERVER_NAME, InferenceModel
from serving.inference.tensors import Inference, Tensor, parameters_of
from serving.service import Service

# As over gRPC, they need no token: Kubernetes probes have none.
_LIVE, _READY = HEALTH_PATHS = ("/v2/health/live", "/v2/health/ready")

Scalar = StrictBool | StrictInt | StrictFloat | StrictStr


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
    """A dimension of -1 is free."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    name: str
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class RequestInput(BaseModel):
    name: str
    shape: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(fail_fast=True)]
    datatype: str
    parameters: dict[str, Scalar] = {}
    data: list[Scalar] = Field(description="flat; pictures in base64", fail_fast=True)


class RequestOutput(BaseModel):
    name: str
    parameters: dict[str, Scalar] = {}


class InferenceRequest(BaseModel):
    id: str | None = None
    parameters: dict[str, Scalar] = Field({}, description="recall or threshold")
    inputs: Annotated[list[RequestInput], Field(fail_fast=True)]
    outputs: Annotated[list[RequestOutput], Field(fail_fast=True)] = []


class ResponseOutput(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    data: list[StrictBool | StrictInt | StrictFloat]


class InferenceResponse(BaseModel):
    """`parameters`: whether the loss is aligned with the Principle of Logit Separation."""

    model_name: str
    id: str | None = None
    parameters: dict[str, bool | str]
    outputs: list[ResponseOutput]


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ProtocolError} for status in (400, 404, 408, 413, 422, 429, 503)
}
_NO_MODEL: dict[int | str, dict[str, Any]] = {404: {"model": ProtocolError}}


class _ProtocolRoute(APIRoute):
    """A route whose refusals are `{"error": "…"}`, as clients of the protocol read them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handle(request)
            except ApiError as error:
                content = {"error": str(error)}
                return JSONResponse(content, status_code=error.status, headers=error.headers)

        return answered


def inference_routes(service: Service) -> APIRouter:
    """The routes under /v2."""
    routes, model = APIRouter(route_class=_ProtocolRoute), InferenceModel(service)

    @routes.get("/v2")
    async def server() -> ServerMetadata:
        """What serves."""
        return ServerMetadata(name=SERVER_NAME, version=model.server_version, extensions=[])

    @routes.get(_LIVE)
    async def live() -> Live:
        """The server runs."""
        return Live(live=True)

    @routes.get(_READY, responses={503: {"model": Ready}})
    async def ready(response: Response) -> Ready:
        """The model answers."""
        return Ready(ready=_ready(model, response))

    @routes.get("/v2/models/{name}", responses=_NO_MODEL)
    async def metadata(name: str) -> ModelMetadata:
        """What the model takes and gives."""
        model.check(name, "")
        inputs, outputs = (
            [TensorMetadata(name=t.name, datatype=t.datatype, shape=list(t.shape)) for t in tensors]
            for tensors in (model.inputs, model.outputs)
        )
        return ModelMetadata(name=name, platform=PLATFORM, inputs=inputs, outputs=outputs)

    @routes.get("/v2/models/{name}/ready", responses=_NO_MODEL | {503: {"model": ModelReady}})
    async def model_ready(name: str, response: Response) -> ModelReady:
        """The model answers."""
        model.check(name, "")
        return ModelReady(name=name, ready=_ready(model, response))

    @routes.post(
        "/v2/models/{name}/infer", responses=_ERRORS, openapi_extra=request_body(InferenceRequest)
    )
    async def infer(name: str, request: Request) -> InferenceResponse:
        """Scores of pictures, or texts, for the classes in `class_ids`."""
        model.check(name, "")
        async with service.admitted() as progress:
            limits = service.config
            raw = await whole_body(request, limits.max_body_bytes, service, progress)
            body, inference = await service.in_thread(_read, raw, most_values(limits))
            outputs, answer = await model.infer(inference)
            progress.inputs = len(answer.results)
        return InferenceResponse(
            model_name=name,
            id=body.id,
            parameters=parameters_of(answer),
            outputs=[
                ResponseOutput(
                    name=t.name, shape=list(t.shape), datatype=t.datatype, data=[*t.data]
                )
                for t in outputs
            ],
        )

    return routes


def _ready(model: InferenceModel, response: Response) -> bool:
    is_ready = model.is_ready()
    response.status_code = 200 if is_ready else 503
    return is_ready


def _read(raw: bytes, most: int) -> tuple[InferenceRequest, Inference]:
    try:
        body = InferenceRequest.model_validate(parse_json(raw, most))
    except ValidationError as error:
        raise invalid("invalid_inference", error, status=400) from error
    return body, _inference(body)


def _inference(body: InferenceRequest) -> Inference:
    return Inference(
        inputs=[
            Tensor(one.name, one.datatype, tuple(one.shape), _data(one)) for one in body.inputs
        ],
        parameters=body.parameters,
        outputs=[output.name for output in body.outputs],
    )


def _data(tensor: RequestInput) -> list[Any]:
    """Elements as they are, those of BYTES as bytes."""
    if tensor.datatype != "BYTES":
        return list(tensor.data)
    texts = [one for one in tensor.data if isinstance(one, str)]
    if len(texts) != len(tensor.data):
        raise ApiError(400, "invalid_inference", f"{tensor.name} holds what is no text")
    if tensor.name != "images":
        return [text.encode("utf-8", "surrogatepass") for text in texts]
    return [picture_bytes(text, f"images[{place}]") for place, text in enumerate(texts)]
