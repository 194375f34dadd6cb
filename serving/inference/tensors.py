"""The transport-independent part of the Open Inference Protocol v2: request and response tensors,
and the model.

Inputs: `images` or `texts`, BYTES [n]; `class_ids`, INT64 [m], or `classes`, BYTES [m] (names). The
parameter `recall` or `threshold` sets the decision rule, and `require` the promise that it needs.
Outputs: `scores`, FP32 [n, m], and, if a
recall or threshold is set, `thresholds`, FP32 [m], and `matches`, BOOL [n, m].

Raw elements are the raw contents of gRPC and the binary tensors of the REST extension. They are
little-endian and in row-major order. Each BYTES element is preceded by its length in 4 bytes.
"""

import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.answer import Rule
from serving.api_error import TOO_MANY_INPUTS, ApiError
from serving.config import ServingConfig
from serving.schemas import Answer

if TYPE_CHECKING:
    from serving.service import Service
    from trainer.bundle.spec import Reads

OUTPUTS = ("scores", "thresholds", "matches")
_CLASS_INPUTS = {"class_ids": "INT64", "classes": "BYTES"}
_PARAMETERS = ("recall", "threshold", "require")
_DECIMAL = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?")
_MAX_DIMENSIONS = 8
# Encoding of raw elements.
_LENGTH = struct.Struct("<I")
_INPUT_DATATYPES = ("BYTES", "INT64")
_OUTPUT_DTYPES = {"FP32": "<f4", "BOOL": "?"}
SERVER_NAME = "kway"
PLATFORM = "pytorch"
EXTENSIONS = ("binary_tensor_data",)
_DATATYPES = {"class_ids": "INT64", "scores": "FP32", "thresholds": "FP32", "matches": "BOOL"}
_SHAPES = {"scores": (-1, -1), "thresholds": (-1,), "matches": (-1, -1)}


@dataclass(frozen=True)
class Tensor:
    """A tensor. `data` is flat and in row-major order; it contains numbers, or bytes if `datatype`
    is BYTES."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Sequence[Any]


@dataclass(frozen=True)
class Inference:
    """A request that has not been validated."""

    inputs: Sequence[Tensor]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[str] = ()


@dataclass(frozen=True)
class CheckedInference:
    """A validated request."""

    inputs: Sequence[bytes | str]
    classes: Sequence[str | int]
    rule: Rule
    outputs: Sequence[str]


def check_inference(
    inference: Inference, reads: "Reads", limits: ServingConfig
) -> CheckedInference:
    """Validate a request for a model that accepts `reads`, either images or texts. Raises ApiError
    (400, 413) with the reason."""
    tensors = {tensor.name: tensor for tensor in inference.inputs}
    if len(tensors) != len(inference.inputs):
        raise invalid_inference("duplicate input. Send each input once")
    check_parameters(inference.parameters, (*_PARAMETERS, "binary_data_output"))
    _check_names(tensors, reads)
    raw = tensors[reads]
    _check_datatype(raw, "BYTES")
    (classes,) = (tensors[name] for name in _CLASS_INPUTS if name in tensors)
    _check_datatype(classes, _CLASS_INPUTS[classes.name])
    for tensor in tensors.values():
        _check_shape(tensor)
    rule = _rule(inference.parameters)
    found = CheckedInference(
        list(raw.data) if reads == "images" else [_text(raw, one) for one in raw.data],
        [_text(classes, one) if isinstance(one, bytes) else one for one in classes.data],
        rule,
        _requested_outputs(
            inference.outputs, is_decided=(rule.recall, rule.threshold) != (None, None)
        ),
    )
    _check_counts(found, reads, limits)
    return found


def outputs_of(answer: Answer, request: CheckedInference) -> list[Tensor]:
    """Return the requested tensors of an answer. Raises ApiError for a class without a
    threshold."""
    rows = [result.verdicts for result in answer.results]
    shape = (len(rows), len(request.classes))
    tensors = {
        "scores": Tensor("scores", "FP32", shape, [v.score for row in rows for v in row]),
    }
    if "matches" in request.outputs or "thresholds" in request.outputs:
        if missing := [found for found in answer.thresholds if found.threshold is None]:
            message = (
                missing[0].reason
                or "a class does not have a threshold for this recall. Send a threshold instead of "
                "a recall"
            )
            raise ApiError(422, "no_threshold", message)
        thresholds = [found.threshold for found in answer.thresholds]
        tensors["thresholds"] = Tensor("thresholds", "FP32", shape[1:], thresholds)
        matches = [bool(v.match) for row in rows for v in row]
        tensors["matches"] = Tensor("matches", "BOOL", shape, matches)
    return [tensors[name] for name in request.outputs]


def parameters_of(answer: Answer) -> dict[str, bool | str]:
    """Return the parameters of a response: whether the loss is aligned and, if not, a notice."""
    parameters: dict[str, bool | str] = {"aligned": answer.aligned}
    return parameters if answer.notice is None else {**parameters, "notice": answer.notice}


def _check_names(tensors: Mapping[str, Tensor], reads: "Reads") -> None:
    known = {reads, *_CLASS_INPUTS}
    if unknown := tensors.keys() - known:
        raise invalid_inference(
            f"unknown input {min(unknown)[:80]!r}. Known inputs are {', '.join(sorted(known))}"
        )
    if reads not in tensors:
        raise invalid_inference(f"input {reads!r} is missing. Send the {reads} as a BYTES tensor")
    if len(tensors.keys() & _CLASS_INPUTS.keys()) != 1:
        raise invalid_inference("send either the input class_ids (INT64) or classes (BYTES)")


def _check_shape(tensor: Tensor) -> None:
    # The product of many dimensions could have millions of digits.
    if len(tensor.shape) > _MAX_DIMENSIONS:
        raise invalid_inference(
            f"{tensor.name} has {len(tensor.shape)} dimensions. Send a one-dimensional tensor"
        )
    if not tensor.shape or math.prod(tensor.shape) != len(tensor.data):
        raise invalid_inference(
            f"{tensor.name} has shape {list(tensor.shape)}, which does not match its "
            f"{len(tensor.data)} elements"
        )
    if max(tensor.shape) != len(tensor.data):
        raise invalid_inference(
            f"{tensor.name} has shape {list(tensor.shape)}. Send a one-dimensional tensor"
        )


def _check_datatype(tensor: Tensor, datatype: str) -> None:
    if tensor.datatype != datatype:
        raise wrong_datatype(tensor.name, tensor.datatype)
    kind: type = bytes if datatype == "BYTES" else int
    if any(not isinstance(one, kind) or isinstance(one, bool) for one in tensor.data):
        raise invalid_inference(f"{tensor.name} contains an element that is not {datatype}")


def _text(tensor: Tensor, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid_inference(
            f"an element of {tensor.name} contains invalid UTF-8 at byte {error.start}"
        ) from error


def _rule(parameters: Mapping[str, Any]) -> Rule:
    require = parameters.get("require")
    if require not in (None, "guaranteed"):
        raise invalid_inference(f"parameter require is {str(require)[:40]}. Send guaranteed")
    recall, threshold = (_number(parameters, name) for name in ("recall", "threshold"))
    # Unlike pydantic, `make_query` rejects invalid numbers with the errors of the protocol.
    return Rule.model_construct(recall=recall, threshold=threshold, require=require)


def _number(parameters: Mapping[str, Any], name: str) -> float | None:
    """Return a parameter as a number. It may be a string, because KServe's gRPC client can send
    only booleans, integers and strings as parameters."""
    value = parameters.get(name)
    if value is None:
        return None
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise invalid_inference(f"parameter {name} is {str(value)[:40]}. Send a finite number")
    return float(value)


def _requested_outputs(outputs: Sequence[str], *, is_decided: bool) -> Sequence[str]:
    known = OUTPUTS if is_decided else OUTPUTS[:1]
    for name in outputs:
        if name not in known:
            hint = "" if is_decided or name not in OUTPUTS else " without recall or threshold"
            raise invalid_inference(
                f"there is no output {name[:80]!r}{hint}. Available outputs: {', '.join(known)}"
            )
    return tuple(outputs) or known


def _check_counts(request: CheckedInference, reads: "Reads", limits: ServingConfig) -> None:
    counts = ((reads, request.inputs, limits.max_inputs),)
    for name, values, limit in (*counts, ("classes", request.classes, limits.max_classes)):
        if not values:
            raise invalid_inference(f"the request contains no {name}. Send at least one")
        if len(values) > limit:
            message = (
                f"the request has {len(values)} {name}, but the limit is {limit}. Split the request"
            )
            raise ApiError(413, TOO_MANY_INPUTS.get(name, "too_many_classes"), message)
    longest = max((len(one) for one in request.inputs if isinstance(one, str)), default=0)
    if longest > limits.max_text_chars:
        message = (
            f"a text has {longest} characters, but the limit is {limits.max_text_chars}. Shorten "
            "the text"
        )
        raise ApiError(413, "text_too_long", message)


def elements_of(name: str, datatype: str, raw: bytes, most: int) -> list[Any]:
    """Return the elements of an input. Raises ApiError: 400 for an unsupported datatype or
    truncated data, 413 for more than `most` elements."""
    if datatype not in _INPUT_DATATYPES:
        raise wrong_datatype(name, datatype)
    if datatype == "BYTES":
        return _with_lengths(name, raw, most)
    if len(raw) > 8 * most:
        raise _too_many(name, most)
    if len(raw) % 8:
        raise invalid_inference(
            f"{name[:80]} has {len(raw)} raw bytes, but INT64 requires a multiple of 8"
        )
    return np.frombuffer(raw, "<i8").tolist()


def array_of(tensor: Tensor) -> np.ndarray:
    """Return the elements of an output, converted to its datatype. A threshold in the request that
    is out of range for FP32 becomes infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(tensor.data).astype(_OUTPUT_DTYPES[tensor.datatype])


def _with_lengths(name: str, raw: bytes, most: int) -> list[bytes]:
    elements: list[bytes] = []
    offset = 0
    while offset < len(raw):
        if len(elements) == most:
            raise _too_many(name, most)
        start = offset + _LENGTH.size
        if start > len(raw):
            raise invalid_inference(
                f"{name[:80]}[{len(elements)}] is truncated within its 4-byte length"
            )
        (length,) = _LENGTH.unpack_from(raw, offset)
        offset = start + length
        if offset > len(raw):
            raise invalid_inference(
                f"{name[:80]}[{len(elements)}] is truncated: its length is {length} bytes, but "
                f"only {len(raw) - start} were sent"
            )
        elements.append(raw[start:offset])
    return elements


def _too_many(name: str, most: int) -> ApiError:
    message = f"{name[:80]} has more than {most} elements. Split the request"
    return ApiError(413, "too_many_values", message)


def invalid_inference(message: str) -> ApiError:
    return ApiError(400, "invalid_inference", message)


def wrong_datatype(name: str, datatype: str) -> ApiError:
    fix = {
        # Clients of other models send tensors of pixels.
        "images": "send the encoded file as one BYTES element",
        "class_ids": "send INT64",
    }.get(name, "send BYTES")
    return invalid_inference(f"{name[:80]} has datatype {datatype[:20]}: {fix}")


def check_parameters(parameters: Iterable[str], known: Sequence[str], of: str = "") -> None:
    """Raise ApiError 400 for a parameter that is not `known`."""
    if unknown := set(parameters) - set(known):
        raise invalid_inference(
            f"unknown parameter {min(unknown)[:80]!r}{of}. Known parameters are {', '.join(known)}"
        )


def server_version() -> str:
    return version("kway")


class InferenceModel:
    """A tensor interface to a `Service`. Every error is an ApiError."""

    def __init__(self, service: "Service") -> None:
        self.service = service
        self.name = service.name

    @property
    def version(self) -> str:
        """The version of the bundle."""
        return self.service.version

    def check(self, name: str, model_version: str) -> None:
        """Raise ApiError 404 if `name` is not this model, or if a version is requested, because
        models are not versioned."""
        if name != self.name:
            message = f"unknown model {name[:80]!r}. This server serves {self.name!r}"
            raise ApiError(404, "unknown_model", message)
        if model_version:
            message = f"model {self.name!r} is not versioned. Remove version {model_version[:80]!r}"
            raise ApiError(404, "unknown_version", message)

    def is_ready(self) -> bool:
        try:
            self.service.check_health()
        except RuntimeError:
            return False
        return True

    @property
    def inputs(self) -> list[Tensor]:
        """The inputs of a request, without their data. A dimension of -1 is variable."""
        read = self.service.model.reads
        return [Tensor(read, "BYTES", (-1,), ()), Tensor("class_ids", "INT64", (-1,), ())]

    @property
    def outputs(self) -> list[Tensor]:
        return [Tensor(name, _DATATYPES[name], _SHAPES[name], ()) for name in OUTPUTS]

    async def infer(self, inference: Inference) -> tuple[list[Tensor], Answer]:
        """Return the requested outputs and the answer that they contain. Call this inside
        `Service.admitted`."""
        service = self.service
        reads = service.model.reads
        request = await service.in_thread(check_inference, inference, reads, service.config)
        query = await service.make_query(request.classes, request.rule)
        answer = await service.answer(request.inputs, query)
        return outputs_of(answer, request), answer
