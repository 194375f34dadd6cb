"""The Open Inference Protocol v2 over REST. Errors have the protocol's format, `{"error": "…"}`.

The body of `POST /v2/models/{name}/infer` is JSON, optionally followed by binary tensors. With the
binary tensor extension, the header `Inference-Header-Content-Length` is the length of the JSON. The
elements of each input with a `binary_data_size` follow the JSON in order
(`serving/inference/tensors.py`). A response has this format if the request asks for binary outputs.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import (
    BaseModel,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from serving.api_error import ApiError, validated
from serving.http.openapi import request_body
from serving.http.query_body import max_values
from serving.http.request_body import image_bytes, parse_json, read_body
from serving.http.routing import ServiceDep, without_token
from serving.inference.tensors import (
    EXTENSIONS,
    PLATFORM,
    SERVER_NAME,
    Inference,
    InferenceModel,
    Tensor,
    array_of,
    check_parameters,
    elements_of,
    invalid_inference,
    parameters_of,
    server_version,
)
from serving.schemas import Answer

Scalar = StrictBool | StrictInt | StrictFloat | StrictStr
HEADER = "Inference-Header-Content-Length"
BINARY = "application/octet-stream"


class _Message(BaseModel):
    """A part of a request. A member that is null is the same as a member that is missing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, found: Any) -> Any:
        if not isinstance(found, dict):
            return found
        return {name: value for name, value in found.items() if value is not None}


class RequestInput(_Message):
    name: str
    shape: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(fail_fast=True)]
    datatype: str
    parameters: dict[str, Scalar] = Field({}, description="binary_data_size, if the data is binary")
    data: list[Any] | None = Field(
        None, description="list of elements, flat or nested; images are base64-encoded"
    )


class RequestOutput(_Message):
    name: str
    parameters: dict[str, Scalar] = Field({}, description="binary_data")


class InferenceRequest(_Message):
    id: str | None = None
    parameters: dict[str, Scalar] = Field(
        {}, description="recall or threshold, and optionally require and binary_data_output"
    )
    inputs: Annotated[list[RequestInput], Field(fail_fast=True)]
    outputs: Annotated[list[RequestOutput], Field(fail_fast=True)] = []


class ResponseOutput(BaseModel):
    """An output tensor with its `data` or, for a binary output, with `binary_data_size` in
    `parameters`."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, int] = {}
    data: list[StrictBool | StrictInt | StrictFloat] = []


class InferenceResponse(BaseModel):
    """The response. `parameters` states whether the loss is aligned with the Principle of Logit
    Separation."""

    model_name: str
    id: str | None = None
    parameters: dict[str, bool | str]
    outputs: list[ResponseOutput]


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


def read_inference(
    raw: bytes, json_length: str | None, most: int
) -> tuple[InferenceRequest, Inference]:
    """Parse a body whose first `json_length` bytes are JSON.

    Raises ApiError: 400 if the body cannot be parsed, 413 if a tensor has more than `most`
    elements.
    """
    text, binary = _parts(raw, json_length)
    body = validated(InferenceRequest, parse_json(text, most), "invalid_inference", status=400)
    for one in body.inputs:
        check_parameters(one.parameters, ("binary_data_size",), f" of {one.name[:80]}")
    for output in body.outputs:
        check_parameters(output.parameters, ("binary_data",), f" of {output.name[:80]}")
    data = _data(body.inputs, binary, most)
    pairs = zip(body.inputs, data, strict=True)
    return body, Inference(
        inputs=[Tensor(one.name, one.datatype, tuple(one.shape), values) for one, values in pairs],
        parameters=body.parameters,
        outputs=[output.name for output in body.outputs],
    )


def response_of(
    name: str, body: InferenceRequest, outputs: Sequence[Tensor], answer: Answer
) -> Response:
    """Return the response to `body`, in the format that the request specifies."""
    binary = _binary_outputs(body, outputs)
    described, raw = [], []
    for tensor in outputs:
        about: dict[str, Any] = {"data": [*tensor.data]}
        if tensor.name in binary:
            raw.append(array_of(tensor).tobytes())
            about = {"parameters": {"binary_data_size": len(raw[-1])}}
        about |= {"name": tensor.name, "shape": [*tensor.shape], "datatype": tensor.datatype}
        described.append(ResponseOutput(**about))
    head = InferenceResponse(
        model_name=name, id=body.id, parameters=parameters_of(answer), outputs=described
    ).model_dump_json(exclude_unset=True)
    if not raw:
        return Response(head, media_type="application/json")
    content = head.encode()
    headers = {HEADER: str(len(content))}
    return Response(content + b"".join(raw), media_type=BINARY, headers=headers)


def _parts(raw: bytes, json_length: str | None) -> tuple[bytes, bytes]:
    """Return the JSON and the bytes that follow it."""
    if json_length is None:
        return raw, b""
    is_length = json_length.isascii() and json_length.isdecimal() and len(json_length) < 20
    if not is_length or int(json_length) > len(raw):
        message = f"{HEADER} is {json_length[:40]!r}, but the body has {len(raw)} bytes"
        raise invalid_inference(message)
    return raw[: int(json_length)], raw[int(json_length) :]


def _data(inputs: Sequence[RequestInput], binary: bytes, most: int) -> list[list[Any]]:
    """Return the elements of each input. Elements of BYTES tensors are `bytes`."""
    found, offset = [], 0
    for one in inputs:
        size = one.parameters.get("binary_data_size")
        if (size is None) == (one.data is None):
            raise invalid_inference(
                f"{one.name[:80]} must have either data or binary_data_size. Send exactly one of "
                "them"
            )
        if size is None:
            found.append(_json_elements(one))
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise invalid_inference(
                f"{one.name[:80]} has binary_data_size {str(size)[:40]}. Send a number of bytes"
            )
        if offset + size > len(binary):
            raise invalid_inference(
                f"{one.name[:80]} has binary_data_size {size}, but only {len(binary) - offset} "
                f"bytes remain after the JSON. Set {HEADER} to the length of the JSON, or send "
                "binary_data=False"
            )
        found.append(elements_of(one.name, one.datatype, binary[offset : offset + size], most))
        offset += size
    if offset != len(binary):
        raise invalid_inference(f"{len(binary) - offset} bytes follow the last input. Remove them")
    return found


def _json_elements(tensor: RequestInput) -> list[Any]:
    data = _flat(tensor)
    if tensor.datatype != "BYTES":
        return data
    texts = [one for one in data if isinstance(one, str)]
    if len(texts) != len(data):
        raise invalid_inference(
            f"{tensor.name} contains elements that are not strings. Send only strings"
        )
    if tensor.name != "images":
        return [text.encode("utf-8", "surrogatepass") for text in texts]
    return [image_bytes(text, f"images[{index}]") for index, text in enumerate(texts)]


def _flat(tensor: RequestInput) -> list[Any]:
    """Return the elements in row-major order."""
    data = tensor.data or []
    while data and isinstance(data[0], list):
        if not all(isinstance(row, list) for row in data):
            raise invalid_inference(
                f"{tensor.name[:80]} mixes lists and elements. Send one element per index"
            )
        data = [one for row in data for one in row]
    return data


def _binary_outputs(body: InferenceRequest, outputs: Sequence[Tensor]) -> set[str]:
    """Return the names of the outputs to send as binary. An output's own setting overrides the
    request's."""
    default = {"binary_data": body.parameters.get("binary_data_output", False)}
    requested = {one.name: default | one.parameters for one in body.outputs}
    return {one.name for one in outputs if requested.get(one.name, default)["binary_data"] is True}
