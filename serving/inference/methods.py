"""The protocol's gRPC methods. Each takes the bytes of a request and returns a response or sets a
status.

Elements are sent either typed, in the `contents` of each tensor, or raw, as one byte string per
tensor. All tensors in a message use the same form, and a response uses the form of its request.
"""

import logging
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from tritonclient.grpc import service_pb2 as pb

from serving.api_error import ApiError
from serving.config import ServingConfig
from serving.inference.protobuf import MAX_VALUES, parsed
from serving.inference.servicer import SERVICE, Context, Servicer, add_methods_to_server
from serving.inference.tensors import (
    InferenceRequest,
    InferenceResponse,
    RequestInput,
    RequestOutput,
    check_model,
    elements_of,
    infer,
    invalid_inference,
    is_ready,
    model_metadata,
    server_metadata,
    wrong_datatype,
)
from serving.service import Service
from serving.tokens import ANONYMOUS, Clients
from serving.versions import ServedModel

_log = logging.getLogger("kway.serving")
_SPARE_CALLS = 64
# Methods that reveal nothing about the model, so they do not require a token.
_OPEN = ("ServerLive", "ServerReady", "Check")
# The services whose health can be checked. "" is the whole server.
_SERVICES = ("", SERVICE)
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
_INPUT_CONTENTS = {"BYTES": "bytes_contents", "INT64": "int64_contents"}
_OUTPUT_CONTENTS = {"FP32": "fp32_contents", "BOOL": "bool_contents"}


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
            client = ANONYMOUS if method in _OPEN else self._client(context)
            service = self._served.current.service
            if method == "ModelInfer":
                return await _infer(service, raw, client)
            return _described(service, method, raw)
        except Exception as error:
            _set_error(context, method, error)
        return pb.ModelInferResponse()  # not sent, because there is an error status

    def _client(self, context: Context) -> str:
        """Return the client of a call. Raises ApiError if its token is missing or wrong."""
        metadata = [(name, value) for name, value in context.invocation_metadata()]
        tokens = [value for name, value in metadata if name == "authorization"]
        addresses = [value for name, value in metadata if name == self._clients.address_header]
        return self._clients.client_of(tokens, addresses)


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
    # The message may quote client input, which may contain lone surrogates.
    plain = message.encode("utf-8", "backslashreplace").decode("utf-8")
    context.set_details(plain[:_MAX_DETAILS_CHARS])


def _described(service: Service, method: str, raw: bytes) -> Message:
    """Return the response of a method that describes the server or the model."""
    match method:
        case "Check":
            name = parsed(HealthCheckRequest, raw).service
            if name not in _SERVICES:
                known = ", ".join(map(repr, _SERVICES))
                raise ApiError(404, "unknown_service", f"unknown service. Known services: {known}")
            return HealthCheckResponse(status="SERVING" if is_ready(service) else "NOT_SERVING")
        case "ServerLive":
            return pb.ServerLiveResponse(live=True)
        case "ServerReady":
            return pb.ServerReadyResponse(ready=is_ready(service))
        case "ServerMetadata":
            return pb.ServerMetadataResponse(**server_metadata())
        case "ModelReady":
            request = parsed(pb.ModelReadyRequest, raw)
            check_model(service, request.name, request.version)
            return pb.ModelReadyResponse(ready=is_ready(service))
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
            message = f"the message is larger than {limits.max_body_bytes} bytes. Split the request"
            raise ApiError(413, "body_too_large", message)
        with service.uploads.bytes.slots(client, len(raw)):
            request, inference = await service.in_thread(_read, raw, most)
            check_model(service, request.model_name, request.model_version)
            answer = await infer(service, inference, progress)
    return response_of(request, answer, service.version)


def _read(raw: bytes, most: int) -> tuple[pb.ModelInferRequest, InferenceRequest]:
    request = parsed(pb.ModelInferRequest, raw, most)
    return request, inference_of(request, most)


def inference_of(request: pb.ModelInferRequest, most: int = MAX_VALUES) -> InferenceRequest:
    """Return the contents of a request. Raises ApiError: 400 if elements are missing, truncated or
    sent in both forms; 413 if a tensor has more than `most` raw elements."""
    raw, inputs = request.raw_input_contents, request.inputs
    if raw and len(raw) != len(inputs):
        raise invalid_inference(
            f"the request has {len(inputs)} inputs, but {len(raw)} raw_input_contents. Send one "
            "per input"
        )
    pairs = zip(inputs, raw or [None] * len(inputs), strict=True)
    elements = [_elements(one, part, most) for one, part in pairs]
    for one in inputs:
        if any(size < 0 for size in one.shape):
            raise invalid_inference(
                f"the shape of {one.name[:80]} has a negative dimension. Send only dimensions of 0 "
                "or more"
            )
    return InferenceRequest(
        id=request.id,
        parameters={name: _scalar(name, value) for name, value in request.parameters.items()},
        inputs=[
            RequestInput(name=one.name, datatype=one.datatype, shape=list(one.shape), data=data)
            for one, data in zip(inputs, elements, strict=True)
        ],
        outputs=[RequestOutput(name=one.name) for one in request.outputs],
    )


def _elements(
    tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None, most: int
) -> list[Any]:
    """Return the elements of an input, which are `raw`, or typed if it is None."""
    if raw is not None:
        if tensor.HasField("contents"):
            raise invalid_inference(
                f"{tensor.name[:80]} has contents, but the request has raw_input_contents. Send "
                "only one of them"
            )
        return elements_of(tensor.name, tensor.datatype, raw, most)
    field = _INPUT_CONTENTS.get(tensor.datatype)
    if field is None:
        raise wrong_datatype(tensor.name, tensor.datatype)
    if any(filled.name != field for filled, _ in tensor.contents.ListFields()):
        raise invalid_inference(
            f"{tensor.name[:80]} has datatype {tensor.datatype}. Send its elements as {field}"
        )
    return list(getattr(tensor.contents, field))


def _scalar(name: str, value: pb.InferParameter) -> bool | int | float | str:
    choice = value.WhichOneof("parameter_choice")
    if choice is None:
        raise invalid_inference(f"parameter {name[:80]} is empty. Set it to a value or remove it")
    return getattr(value, choice)


def response_of(
    request: pb.ModelInferRequest, answer: InferenceResponse, version: str
) -> pb.ModelInferResponse:
    """Return the response to a request, with tensors in the form that the request uses."""
    response = pb.ModelInferResponse(
        model_name=answer.model_name, model_version=version, id=answer.id
    )
    for name, value in answer.parameters.items():
        field = "bool_param" if isinstance(value, bool) else "string_param"
        setattr(response.parameters[name], field, value)
    for tensor in answer.outputs:
        elements = tensor.array()
        output = response.outputs.add(
            name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
        )
        if request.raw_input_contents:
            response.raw_output_contents.append(elements.tobytes())
        else:
            field = _OUTPUT_CONTENTS[tensor.datatype]
            getattr(output.contents, field).extend(elements.tolist())
    return response
