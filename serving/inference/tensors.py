"""The transport-independent part of the Open Inference Protocol v2: requests, responses, metadata.

Inputs: `images` or `texts`, BYTES [n]; `class_ids`, INT64 [m], or `classes`, BYTES [m] (names). The
parameter `recall` or `threshold` sets the decision rule, and `require` the promise that it needs.
Outputs: `scores`, FP32 [n, m], and, if a recall or threshold is set, `thresholds`, FP32 [m], and
`matches`, BOOL [n, m].

Raw elements are the contents of gRPC and the binary tensors of the REST extension. They are
little-endian and in row-major order. Each BYTES element is preceded by its length in 4 bytes.
"""

import math
import struct
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    model_validator,
)

from serving.answer import Rule
from serving.api_error import ApiError
from serving.config import ServingConfig
from serving.limits import check_count, check_inputs
from serving.schemas import Answer
from serving.service import InProgress, Service
from trainer.bundle.spec import Reads

_CLASS_INPUTS = {"class_ids": "INT64", "classes": "BYTES"}
# Datatype, encoding and shape. A dimension of -1 is variable.
_OUTPUTS = {
    "scores": ("FP32", "<f4", [-1, -1]),
    "thresholds": ("FP32", "<f4", [-1]),
    "matches": ("BOOL", "?", [-1, -1]),
}
_MAX_DIMENSIONS = 8
_LENGTH = struct.Struct("<I")
_STRICT = ConfigDict(extra="forbid")


class _Message(BaseModel):
    """A part of a request. A member that is null is the same as a member that is missing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, found: Any) -> Any:
        if not isinstance(found, dict):
            return found
        return {name: value for name, value in found.items() if value is not None}


class InputParameters(BaseModel):
    model_config = _STRICT

    binary_data_size: Annotated[StrictInt, Field(ge=0)] | None = None


class RequestInput(_Message):
    name: str
    shape: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(fail_fast=True)]
    datatype: str
    parameters: InputParameters = InputParameters()
    # Both transports set it to the flat elements, which are `bytes` if the datatype is BYTES.
    data: list[Any] = Field(
        [], description="list of elements, flat or nested; images are base64-encoded"
    )


class OutputParameters(BaseModel):
    model_config = _STRICT

    binary_data: StrictBool | None = None


class RequestOutput(_Message):
    name: str
    parameters: OutputParameters = OutputParameters()


class RequestParameters(Rule):
    """Numbers may be strings, because KServe's gRPC client cannot send other ones."""

    model_config = _STRICT

    binary_data_output: StrictBool | None = None


class InferenceRequest(_Message):
    id: str | None = None
    parameters: RequestParameters = RequestParameters()
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

    def array(self) -> np.ndarray:
        """Return the elements, converted to the datatype. A threshold in the request that is out of
        range for FP32 becomes infinite."""
        with np.errstate(over="ignore"):
            return np.asarray(self.data).astype(_OUTPUTS[self.name][1])


class InferenceResponse(BaseModel):
    """The response. `parameters` states whether the loss is aligned with the Principle of Logit
    Separation."""

    model_name: str
    id: str | None = None
    parameters: dict[str, bool | str]
    outputs: list[ResponseOutput]


def server_metadata() -> dict[str, Any]:
    extensions = ["binary_tensor_data"]
    return {"name": "kway", "version": version("kway"), "extensions": extensions}


def model_metadata(service: Service) -> dict[str, Any]:
    inputs = ((service.model.reads, "BYTES"), ("class_ids", "INT64"))
    return {
        "name": service.name,
        "platform": "pytorch",
        "inputs": [{"name": name, "datatype": of, "shape": [-1]} for name, of in inputs],
        "outputs": [
            {"name": name, "datatype": of, "shape": shape}
            for name, (of, _, shape) in _OUTPUTS.items()
        ],
    }


def check_model(service: Service, name: str, model_version: str = "") -> None:
    """Raise ApiError 404 if `name` is not the model of `service`, or if a version is requested,
    because models are not versioned."""
    if name != service.name:
        message = f"unknown model {name[:80]!r}. This server serves {service.name!r}"
        raise ApiError(404, "unknown_model", message)
    if model_version:
        message = f"model {name!r} is not versioned. Remove version {model_version[:80]!r}"
        raise ApiError(404, "unknown_version", message)


async def infer(
    service: Service, request: InferenceRequest, progress: InProgress
) -> InferenceResponse:
    """Return the response to a request. Call this inside `Service.admitted`, which returns
    `progress`. Raises ApiError."""
    inputs, classes, names = await service.in_thread(
        check_inference, request, service.model.reads, service.config
    )
    answer = await service.answer(inputs, await service.make_query(classes, request.parameters))
    outputs = _outputs_of(answer, names)
    progress.inputs = len(answer.results)
    notice = {} if answer.notice is None else {"notice": answer.notice}
    return InferenceResponse(
        model_name=service.name,
        id=request.id,
        parameters={"aligned": answer.aligned, **notice},
        outputs=outputs,
    )


def check_inference(
    request: InferenceRequest, reads: Reads, limits: ServingConfig
) -> tuple[Sequence[bytes | str], Sequence[str | int], Sequence[str]]:
    """Validate a request for a model that accepts `reads`, either images or texts. Returns the
    images or texts, the classes and the names of the requested outputs.

    Raises ApiError (400, 413) with the reason.
    """
    tensors = {tensor.name: tensor for tensor in request.inputs}
    if len(tensors) != len(request.inputs):
        raise invalid_inference("duplicate input. Send each input once")
    known = {reads, *_CLASS_INPUTS}
    if unknown := tensors.keys() - known:
        raise invalid_inference(
            f"unknown input {min(unknown)[:80]!r}. Known inputs are {', '.join(sorted(known))}"
        )
    if reads not in tensors:
        raise invalid_inference(f"input {reads!r} is missing. Send the {reads} as a BYTES tensor")
    if len(tensors) != 2:
        raise invalid_inference("send either the input class_ids (INT64) or classes (BYTES)")
    raw = tensors.pop(reads)
    (named,) = tensors.values()
    _check(raw, "BYTES")
    _check(named, _CLASS_INPUTS[named.name])
    inputs, classes = raw.data if reads == "images" else _texts(raw), _texts(named)
    outputs = _requested_outputs(request)
    check_inputs(inputs, reads, limits)
    if not classes:
        raise invalid_inference("the request contains no classes. Send at least one")
    check_count(len(classes), "classes", limits.max_classes)
    return inputs, classes, outputs


def _check(tensor: RequestInput, datatype: str) -> None:
    """Raise ApiError 400 if the datatype, the elements or the shape are wrong."""
    if tensor.datatype != datatype:
        raise wrong_datatype(tensor.name, tensor.datatype)
    kind = bytes if datatype == "BYTES" else int
    if any(type(one) is not kind for one in tensor.data):  # a bool is not an INT64
        raise invalid_inference(f"{tensor.name} contains an element that is not {datatype}")
    shape, count = tensor.shape, len(tensor.data)
    # The product of many dimensions could have millions of digits.
    if len(shape) > _MAX_DIMENSIONS:
        problem = f"{len(shape)} dimensions. Send a one-dimensional tensor"
    elif not shape or math.prod(shape) != count:
        problem = f"shape {shape}, which does not match its {count} elements"
    elif max(shape) != count:
        problem = f"shape {shape}. Send a one-dimensional tensor"
    else:
        return
    raise invalid_inference(f"{tensor.name} has {problem}")


def _texts(tensor: RequestInput) -> list[Any]:
    """Return the elements, decoded if they are bytes."""
    try:
        return [one.decode() if isinstance(one, bytes) else one for one in tensor.data]
    except UnicodeDecodeError as error:
        raise invalid_inference(
            f"an element of {tensor.name} contains invalid UTF-8 at byte {error.start}"
        ) from error


def _requested_outputs(request: InferenceRequest) -> Sequence[str]:
    is_decided = (request.parameters.recall, request.parameters.threshold) != (None, None)
    known = list(_OUTPUTS) if is_decided else ["scores"]
    for output in request.outputs:
        if output.name not in known:
            hint = " without recall or threshold" if output.name in _OUTPUTS else ""
            raise invalid_inference(
                f"there is no output {output.name[:80]!r}{hint}. Available outputs: "
                f"{', '.join(known)}"
            )
    return [output.name for output in request.outputs] or known


def _outputs_of(answer: Answer, names: Sequence[str]) -> list[ResponseOutput]:
    """Return the outputs `names` of an answer. Raises ApiError for a class without a threshold."""
    missing = [found for found in answer.thresholds if found.threshold is None]
    if missing and {*names} != {"scores"}:
        message = (
            missing[0].reason
            or "a class does not have a threshold for this recall. Send a threshold instead of a "
            "recall"
        )
        raise ApiError(422, "no_threshold", message)
    verdicts = [verdict for result in answer.results for verdict in result.verdicts]
    shape = [len(answer.results), len(answer.results[0].verdicts)]
    data: dict[str, list[Any]] = {
        "scores": [verdict.score for verdict in verdicts],
        "thresholds": [found.threshold for found in answer.thresholds],
        "matches": [bool(verdict.match) for verdict in verdicts],
    }
    return [
        ResponseOutput(
            name=name,
            datatype=_OUTPUTS[name][0],
            shape=shape[1:] if name == "thresholds" else shape,
            data=data[name],
        )
        for name in names
    ]


def elements_of(name: str, datatype: str, raw: bytes, most: int) -> list[Any]:
    """Return the raw elements of an input. Raises ApiError: 400 for an unsupported datatype or
    truncated data, 413 for more than `most` elements."""
    message = f"{name[:80]} has more than {most} elements. Split the request"
    too_many = ApiError(413, "too_many_values", message)
    if datatype == "INT64":
        if len(raw) > 8 * most:
            raise too_many
        if len(raw) % 8:
            raise invalid_inference(
                f"{name[:80]} has {len(raw)} raw bytes, but INT64 requires a multiple of 8"
            )
        return np.frombuffer(raw, "<i8").tolist()
    if datatype != "BYTES":
        raise wrong_datatype(name, datatype)
    elements: list[bytes] = []
    offset = 0
    while offset < len(raw):
        if len(elements) == most:
            raise too_many
        where, start = f"{name[:80]}[{len(elements)}] is truncated", offset + _LENGTH.size
        if start > len(raw):
            raise invalid_inference(f"{where} within its 4-byte length")
        (length,) = _LENGTH.unpack_from(raw, offset)
        offset = start + length
        if offset > len(raw):
            raise invalid_inference(
                f"{where}: its length is {length} bytes, but only {len(raw) - start} were sent"
            )
        elements.append(raw[start:offset])
    return elements


def invalid_inference(message: str) -> ApiError:
    return ApiError(400, "invalid_inference", message)


def wrong_datatype(name: str, datatype: str) -> ApiError:
    # Clients of other models send tensors of pixels.
    fixes = {"images": "send the encoded file as one BYTES element", "class_ids": "send INT64"}
    fix = fixes.get(name, "send BYTES")
    return invalid_inference(f"{name[:80]} has datatype {datatype[:20]}: {fix}")
