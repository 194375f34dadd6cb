"""The Open Inference Protocol v2 over REST. Errors have the protocol's format, `{"error": "…"}`.

The body of `POST /v2/models/{name}/infer` is JSON, optionally followed by binary tensors. With the
binary tensor extension, the header `Inference-Header-Content-Length` is the length of the JSON. The
elements of each input with a `binary_data_size` follow the JSON in order
(`serving/inference/tensors.py`). A response has this format if the request asks for binary outputs.
"""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from pydantic import BaseModel

from serving.config import ServingConfig
from serving.http.entry import ServiceDep
from serving.http.request_body import image_bytes, parse_json, read_body
from serving.inference import tensors
from serving.inference.tensors import (
    InferenceRequest,
    InferenceResponse,
    RequestInput,
    check_model,
    elements_of,
    invalid_inference,
)
from serving.limits import max_values

_HEADER = "Inference-Header-Content-Length"
_MEDIA_TYPE = "application/octet-stream"


class ProtocolError(BaseModel):
    error: str


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ProtocolError} for status in (400, 404, 408, 413, 415, 422, 429, 503)
}
_BINARY = {_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_BINARY_ANSWER: dict[int | str, dict[str, Any]] = {200: {"content": _BINARY}}
_NO_MODEL: dict[int | str, dict[str, Any]] = {404: {"model": ProtocolError}}
_NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "The model is not ready"}}
_JSON = {"schema": {"type": "object", "description": "a request of the protocol"}}
_BODY = {"requestBody": {"required": True, "content": {"application/json": _JSON, **_BINARY}}}


router, open_router = APIRouter(), APIRouter()


@router.get("/v2")
async def server() -> dict[str, Any]:
    """Return the metadata of the server."""
    return tensors.server_metadata()


@open_router.get("/v2/health/live")
async def live() -> dict[str, bool]:
    """Check that the server is running."""
    return {"live": True}


@open_router.get("/v2/health/ready", responses=_NOT_READY)
async def ready(service: ServiceDep, response: Response) -> dict[str, Any]:
    """Check that the model is ready."""
    found = service.is_healthy()
    response.status_code = 200 if found else 503
    return {"ready": found}


@router.get("/v2/models/{name}", responses=_NO_MODEL)
async def metadata(name: str, service: ServiceDep) -> dict[str, Any]:
    """Return the inputs and outputs of the model. A dimension of -1 is variable."""
    check_model(service, name)
    return tensors.model_metadata(service)


@router.get("/v2/models/{name}/ready", responses=_NO_MODEL | _NOT_READY)
async def model_ready(name: str, service: ServiceDep, response: Response) -> dict[str, Any]:
    """Check that the model is ready."""
    check_model(service, name)
    return {"name": name, **await ready(service, response)}


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
    json_length: Annotated[
        str | None,
        Header(
            alias=_HEADER,
            description="length in bytes of the JSON that precedes the binary tensors",
        ),
    ] = None,
) -> Response:
    """Compute scores of images or texts for the classes in `class_ids` or `classes`."""
    check_model(service, name)
    async with service.admitted(request.state.client) as progress:
        raw = await read_body(request, service, progress)
        body = await service.in_thread(_read, raw, json_length, service.config)
        answer = await tensors.infer(service, body, progress)
    return _response_of(body, answer)


def _read(raw: bytes, json_length: str | None, limits: ServingConfig) -> InferenceRequest:
    """Parse a body whose first `json_length` bytes are JSON.

    Raises ApiError: 400 if the body cannot be parsed, 413 if a tensor has too many elements.
    """
    length = len(raw)
    if json_length is not None:
        if not re.fullmatch("[0-9]{1,19}", json_length) or int(json_length) > length:
            message = f"{_HEADER} is {json_length[:40]!r}, but the body has {length} bytes"
            raise invalid_inference(message)
        length = int(json_length)
    body = parse_json(InferenceRequest, raw[:length], limits, "invalid_inference", status=400)
    for one in body.inputs:
        length += _read_data(one, raw, length, max_values(limits))
    if length != len(raw):
        raise invalid_inference(f"{len(raw) - length} bytes follow the last input. Remove them")
    return body


def _read_data(tensor: RequestInput, raw: bytes, start: int, most: int) -> int:
    """Set the data of an input to its elements, which begin at `start` if they are binary. Returns
    the number of binary bytes."""
    name, size = tensor.name[:80], tensor.parameters.binary_data_size
    if (size is None) == ("data" not in tensor.model_fields_set):
        raise invalid_inference(
            f"{name} must have either data or binary_data_size. Send exactly one of them"
        )
    if size is None:
        tensor.data = _elements(tensor)
        return 0
    if start + size > len(raw):
        raise invalid_inference(
            f"{name} has binary_data_size {size}, but only {len(raw) - start} bytes remain after "
            f"the JSON. Set {_HEADER} to the length of the JSON, or send binary_data=False"
        )
    tensor.data = elements_of(tensor.name, tensor.datatype, raw[start : start + size], most)
    return size


def _elements(tensor: RequestInput) -> list[Any]:
    """Return the elements of JSON data, which may be nested, in row-major order."""
    data = tensor.data
    while data and isinstance(data[0], list):
        if not all(isinstance(row, list) for row in data):
            raise invalid_inference(
                f"{tensor.name[:80]} mixes lists and elements. Send one element per index"
            )
        data = [one for row in data for one in row]
    if tensor.datatype != "BYTES":
        return data
    if not all(isinstance(one, str) for one in data):
        raise invalid_inference(
            f"{tensor.name} contains elements that are not strings. Send only strings"
        )
    if tensor.name == "images":
        return [image_bytes(one, f"images[{index}]") for index, one in enumerate(data)]
    return [one.encode("utf-8", "surrogatepass") for one in data]


def _response_of(request: InferenceRequest, answer: InferenceResponse) -> Response:
    """Return `answer` with each output in the format that the request specifies. An output's own
    setting overrides the request's."""
    default = request.parameters.binary_data_output
    own = {one.name: one.parameters.binary_data for one in request.outputs}
    raw: list[bytes] = []
    binary: dict[int, set[str]] = {}
    for position, one in enumerate(answer.outputs):
        if default if (is_binary := own.get(one.name)) is None else is_binary:
            raw.append(one.array().tobytes())
            one.parameters, binary[position] = {"binary_data_size": len(raw[-1])}, {"data"}
    head = answer.model_dump_json(exclude_unset=True, exclude={"outputs": binary}).encode()
    if not raw:
        return Response(head, media_type="application/json")
    headers = {_HEADER: str(len(head))}
    return Response(head + b"".join(raw), media_type=_MEDIA_TYPE, headers=headers)
