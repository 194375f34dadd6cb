"""The protocol's gRPC methods. Each takes the bytes of a request and returns a response or sets a
status.

The elements of tensors are raw, one byte string per tensor, or the typed `contents` of each tensor,
which KServe's client sends for lists. Outputs are raw.
"""

import logging
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2 as pb

from serving.api_error import ApiError, validated
from serving.config import ServingConfig
from serving.inference.servicer import Context, Servicer, add_methods_to_server
from serving.inference.tensors import (
    InferenceRequest,
    InferenceResponse,
    check_model,
    elements_of,
    infer,
    invalid_inference,
    model_metadata,
    server_metadata,
    wrong_datatype,
)
from serving.limits import MAX_VALUES, body_too_large
from serving.service import Service
from serving.tokens import ANONYMOUS, Clients
from serving.versions import ServedModel

_log = logging.getLogger("kway.serving")
_SPARE_CALLS = 64
# Methods that reveal nothing about the model, so they do not require a token.
_OPEN = ("ServerLive", "ServerReady")
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
# The details of an error are sent as a header, in which a character can occupy nine bytes. All
# headers together are limited to 8 KiB.
_MAX_DETAILS_CHARS = 500
_VARINT, _EIGHT_BYTES, _WITH_LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_FIXED_BYTES = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
_VARINT_BYTES = 10
_ONE_VALUE = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
# The field with the typed elements of an input, by datatype.
_CONTENTS = {"BYTES": "bytes_contents", "INT64": "int64_contents"}


class InferenceMethods:
    """Implements the gRPC methods for `model` and authenticates `clients`."""

    def __init__(self, model: ServedModel, clients: Clients) -> None:
        self._served, self._clients = model, clients

    async def call(self, method: str, raw: bytes, context: Context) -> Message:
        """Return the response to `raw`, which is a request to `method`. If it fails, set a status
        in `context` and return an empty message.

        Exceptions other than cancellation are caught, because gRPC would show them to clients.
        """
        try:
            client, metadata = ANONYMOUS, context.invocation_metadata()
            if method not in _OPEN:
                tokens = [value for name, value in metadata if name == "authorization"]
                client = self._clients.client_of(tokens, ANONYMOUS)
            service = self._served.current.service
            if method == "ModelInfer":
                return await _infer(service, raw, client)
            return _described(service, method, raw)
        except Exception as error:
            _set_error(context, method, error)
        return pb.ModelInferResponse()  # not sent, because there is an error status


def grpc_server(methods: InferenceMethods, config: ServingConfig) -> grpc.aio.Server:
    """Return a server for `methods` on the gRPC port of `config`. Call this on the event loop of
    the service."""
    # A response takes a few KiB, even if the limit on requests is smaller.
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", max(config.max_body_bytes, 2**20))],
        maximum_concurrent_rpcs=config.max_requests + _SPARE_CALLS,
    )
    add_methods_to_server(Servicer(methods.call), server)
    host = f"[{config.host}]" if ":" in config.host else config.host
    server.add_insecure_port(f"{host}:{config.grpc_port}")
    return server


def _set_error(context: Context, method: str, error: Exception) -> None:
    """Set the status of a failed call. Internal errors are logged, but not shown to the client."""
    if isinstance(error, ApiError):
        code, message = _CODES.get(error.status, grpc.StatusCode.UNKNOWN), str(error)
        if error.headers and "Retry-After" in error.headers:
            context.set_trailing_metadata([("retry-after", error.headers["Retry-After"])])
    else:
        code, message = grpc.StatusCode.INTERNAL, "internal server error; see the server log"
        _log.exception("%s failed", method, exc_info=error)
    context.set_code(code)
    context.set_details(message[:_MAX_DETAILS_CHARS])


def _described(service: Service, method: str, raw: bytes) -> Message:
    """Return the response of a method that describes the server or the model."""
    match method:
        case "ServerLive":
            return pb.ServerLiveResponse(live=True)
        case "ServerReady":
            return pb.ServerReadyResponse(ready=service.is_healthy())
        case "ServerMetadata":
            return pb.ServerMetadataResponse(**server_metadata())
        case "ModelReady":
            request = parsed(pb.ModelReadyRequest, raw)
            check_model(service, request.name, request.version)
            return pb.ModelReadyResponse(ready=service.is_healthy())
        case "ModelMetadata":
            request = parsed(pb.ModelMetadataRequest, raw)
            check_model(service, request.name, request.version)
            return pb.ModelMetadataResponse(**model_metadata(service))
    raise AssertionError(method)


async def _infer(service: Service, raw: bytes, client: str) -> Message:
    limits = service.config
    # A packed number takes up to ten bytes, and each byte is counted as a value.
    most = MAX_VALUES + 10 * (limits.max_inputs + limits.max_classes)
    async with service.admitted(client) as progress:
        progress.acquire_slot()
        if len(raw) > limits.max_body_bytes:
            raise body_too_large(limits.max_body_bytes)
        with service.shared.upload_bytes.slots(client, len(raw)):
            request, inference = await service.in_thread(_read, raw, most)
            check_model(service, request.model_name, request.model_version)
            answer = await infer(service, inference, progress)
    return response_of(answer, service.version)


def _read(raw: bytes, most: int) -> tuple[pb.ModelInferRequest, InferenceRequest]:
    request = parsed(pb.ModelInferRequest, raw, most)
    return request, inference_of(request, most)


def inference_of(request: pb.ModelInferRequest, most: int = MAX_VALUES) -> InferenceRequest:
    """Return the contents of a request. Raises ApiError: 400 if it is invalid, 413 if a tensor has
    more than `most` raw elements."""
    raw, inputs = request.raw_input_contents, request.inputs
    if raw and (len(raw) != len(inputs) or any(one.HasField("contents") for one in inputs)):
        raise invalid_inference(
            f"the request has {len(inputs)} inputs and {len(raw)} raw_input_contents. Send the "
            "elements of all inputs in raw_input_contents, or of all in their contents"
        )
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice") or "", None)
        for name, value in request.parameters.items()
    }
    contents = {
        "id": request.id,
        "parameters": parameters,
        "inputs": [
            {
                "name": one.name,
                "datatype": one.datatype,
                "shape": list(one.shape),
                "data": _typed(one)
                if part is None
                else elements_of(one.name, one.datatype, part, most),
            }
            for one, part in zip(inputs, raw or [None] * len(inputs), strict=True)
        ],
        "outputs": [{"name": one.name} for one in request.outputs],
    }
    return validated(InferenceRequest, contents, "invalid_inference", status=400)


def _typed(tensor: pb.ModelInferRequest.InferInputTensor) -> list[Any]:
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise wrong_datatype(tensor.name, tensor.datatype)
    if any(filled.name != field for filled, _ in tensor.contents.ListFields()):
        raise invalid_inference(
            f"{tensor.name[:80]} has datatype {tensor.datatype}. Send its elements as {field}"
        )
    return list(getattr(tensor.contents, field))


def response_of(answer: InferenceResponse, version: str) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(
        model_name=answer.model_name, model_version=version, id=answer.id
    )
    for name, value in answer.parameters.items():
        field = "bool_param" if isinstance(value, bool) else "string_param"
        setattr(response.parameters[name], field, value)
    for tensor in answer.outputs:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(tensor.array().tobytes())
    return response


def parsed(kind: type[Message], raw: bytes, most: int = MAX_VALUES) -> Any:
    """Parse a message of type `kind`, which must not be recursive. Raises ApiError: 400 if the
    message is malformed, 413 if it contains more than `most` values.

    The values are counted before the message is parsed: protobuf's parser blocks all threads and
    creates an object for each field, even if the field takes up only two bytes.
    """
    count = 0
    for more in _sizes(raw, 0, len(raw), kind.DESCRIPTOR):
        count += more
        if count > most:
            message = f"the message contains more than {most} values. Split the request"
            raise ApiError(413, "too_many_values", message)
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise _malformed(kind.DESCRIPTOR) from error


def _sizes(raw: bytes, offset: int, end: int, kind: Descriptor) -> Iterator[int]:
    """Yield, for each field, also of nested messages, an upper bound on the number of values that
    it contains."""
    while offset < end:
        yield 1
        tag, offset = _varint(raw, offset, end, kind)
        field, wire = kind.fields_by_number.get(tag >> 3), tag & 7
        if wire == _WITH_LENGTH:
            size, offset = _varint(raw, offset, end, kind)
            if size > end - offset:
                raise _malformed(kind)
            if field is not None and field.message_type is not None:
                yield from _sizes(raw, offset, offset + size, field.message_type)
            elif field is not None and field.type not in _ONE_VALUE:
                yield size  # packed numbers
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
