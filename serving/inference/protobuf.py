"""Converts the protocol's gRPC messages to and from tensors. `tensors.py` validates the contents.

The values in a message are counted before it is parsed. The parser blocks all threads and creates
an object for each field, even if the field takes up only two bytes.

Elements are sent either typed, in the `contents` of each tensor, or raw, as one byte string per
tensor. All tensors in a message use the same form, and a response uses the form of its request.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2 as pb

from serving.api_error import ApiError
from serving.inference.tensors import (
    Inference,
    Tensor,
    array_of,
    elements_of,
    invalid_inference,
    wrong_datatype,
)

_VARINT, _EIGHT_BYTES, _WITH_LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_FIXED_BYTES = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
_VARINT_BYTES = 10
_ONE_VALUE = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def check_count(raw: bytes, kind: Descriptor, most: int) -> None:
    """Raise ApiError for a message with more than `most` values (413) or a malformed message (400).

    Counts fields, including those of nested messages, and the bytes of packed numbers. `kind` must
    not be a recursive message type.
    """
    count = 0
    for more in _sizes(raw, 0, len(raw), kind):
        count += more
        if count > most:
            message = f"the message contains more than {most} values. Split the request"
            raise ApiError(413, "too_many_values", message)


def _sizes(raw: bytes, offset: int, end: int, kind: Descriptor) -> Iterator[int]:
    """Yield, for each field, an upper bound on the number of values that it contains."""
    while offset < end:
        yield 1
        tag, offset = _varint(raw, offset, end, kind)
        if not tag >> 3:
            raise _malformed(kind)
        field, wire = kind.fields_by_number.get(tag >> 3), tag & 7
        if wire == _WITH_LENGTH:
            size, offset = _varint(raw, offset, end, kind)
            if size > end - offset:
                raise _malformed(kind)
            if field is not None and field.message_type is not None:
                yield from _sizes(raw, offset, offset + size, field.message_type)
            elif field is not None and field.type not in _ONE_VALUE:
                yield size
            offset += size
        elif wire == _VARINT:
            _, offset = _varint(raw, offset, end, kind)
        elif wire in _FIXED_BYTES:
            offset += _FIXED_BYTES[wire]
        else:
            raise _malformed(kind)


def _varint(raw: bytes, offset: int, end: int, kind: Descriptor) -> tuple[int, int]:
    """Return a varint (7 bits per byte) and the offset after it."""
    value = 0
    for count, byte in enumerate(raw[offset : min(end, offset + _VARINT_BYTES)]):
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value, offset + count + 1
    raise _malformed(kind)


def _malformed(kind: Descriptor) -> ApiError:
    return invalid_inference(f"the message is not a valid {kind.name}")


_INPUT_CONTENTS = {"BYTES": "bytes_contents", "INT64": "int64_contents"}
_OUTPUT_CONTENTS = {"FP32": "fp32_contents", "BOOL": "bool_contents"}
# Limit per message. Callers add the limits on inputs and classes where these apply.
MAX_VALUES = 10_000


def parsed(kind: type[Message], raw: bytes, most: int = MAX_VALUES) -> Any:
    """Parse a message of type `kind`. Raises ApiError: 400 if the message is malformed, 413 if it
    contains more than `most` values."""
    check_count(raw, kind.DESCRIPTOR, most)
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise _malformed(kind.DESCRIPTOR) from error


def inference_of(request: pb.ModelInferRequest, most: int = MAX_VALUES) -> Inference:
    """Return the tensors and parameters of a request. Raises ApiError: 400 if elements are missing,
    truncated or sent in both forms; 413 if a tensor has more than `most` raw elements."""
    typed = [one.name for one in request.inputs if one.HasField("contents")]
    if request.raw_input_contents:
        if typed:
            raise invalid_inference(
                f"{typed[0][:80]} has contents, but the request has raw_input_contents. Send "
                "only one of them"
            )
        if len(request.raw_input_contents) != len(request.inputs):
            raise invalid_inference(
                f"the request has {len(request.inputs)} inputs, but "
                f"{len(request.raw_input_contents)} raw_input_contents. Send one per input"
            )
        pairs = zip(request.inputs, request.raw_input_contents, strict=True)
        data = [elements_of(one.name, one.datatype, raw, most) for one, raw in pairs]
    else:
        data = [_typed_elements(one) for one in request.inputs]
    return Inference(
        [
            Tensor(one.name, one.datatype, _shape(one), elements)
            for one, elements in zip(request.inputs, data, strict=True)
        ],
        {name: _scalar(name, value) for name, value in request.parameters.items()},
        [output.name for output in request.outputs],
    )


def response_of(
    request: pb.ModelInferRequest,
    outputs: Sequence[Tensor],
    parameters: dict[str, bool | str],
) -> pb.ModelInferResponse:
    """Return the response to a request, with tensors in the form that the request uses."""
    response = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
    for name, value in parameters.items():
        field = "bool_param" if isinstance(value, bool) else "string_param"
        setattr(response.parameters[name], field, value)
    for tensor in outputs:
        output = response.outputs.add(
            name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
        )
        elements = array_of(tensor)
        if request.raw_input_contents:
            response.raw_output_contents.append(elements.tobytes())
        else:
            field = _OUTPUT_CONTENTS[tensor.datatype]
            getattr(output.contents, field).extend(elements.tolist())
    return response


def metadata_of(tensors: Sequence[Tensor]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
    """Return the names, datatypes and shapes of a model's inputs or outputs."""
    kind = pb.ModelMetadataResponse.TensorMetadata
    return [kind(name=one.name, datatype=one.datatype, shape=one.shape) for one in tensors]


def _shape(tensor: pb.ModelInferRequest.InferInputTensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape):
        raise invalid_inference(
            f"the shape of {tensor.name[:80]} has a negative dimension. Send only dimensions of 0 "
            "or more"
        )
    return shape


def _typed_elements(tensor: pb.ModelInferRequest.InferInputTensor) -> list[Any]:
    field = _contents_field(tensor)
    if any(filled.name != field for filled, _ in tensor.contents.ListFields()):
        raise invalid_inference(
            f"{tensor.name[:80]} has datatype {tensor.datatype}. Send its elements as {field}"
        )
    return list(getattr(tensor.contents, field))


def _contents_field(tensor: pb.ModelInferRequest.InferInputTensor) -> str:
    field = _INPUT_CONTENTS.get(tensor.datatype)
    if field is None:
        raise wrong_datatype(tensor.name, tensor.datatype)
    return field


def _scalar(name: str, value: pb.InferParameter) -> bool | int | float | str:
    choice = value.WhichOneof("parameter_choice")
    if choice is None:
        raise invalid_inference(f"parameter {name[:80]} is empty. Set it to a value or remove it")
    return getattr(value, choice)
