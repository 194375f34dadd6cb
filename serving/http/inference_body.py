"""Bodies of `POST /v2/models/{name}/infer`: JSON, optionally followed by binary tensors.

With the binary tensor extension, the header `Inference-Header-Content-Length` is the length of the
JSON. The elements of each input with a `binary_data_size` follow the JSON in order
(`serving/inference/tensors.py`). A response has this format if the request asks for binary outputs.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Response
from pydantic import (
    BaseModel,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from serving.api_error import validated
from serving.http.request_body import image_bytes, parse_json
from serving.inference.tensors import (
    Inference,
    Tensor,
    array_of,
    check_parameters,
    elements_of,
    invalid_inference,
    parameters_of,
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
