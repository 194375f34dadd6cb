"""The protocol's gRPC methods. Each takes the bytes of a request and returns a response or sets a
status.

Elements are sent either typed, in the `contents` of each tensor, or raw, as one byte string per
tensor. All tensors in a message use the same form, and a response uses the form of its request.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
    EXTENSIONS,
    PLATFORM,
    SERVER_NAME,
    Inference,
    InferenceModel,
    Tensor,
    array_of,
    elements_of,
    invalid_inference,
    parameters_of,
    server_version,
    wrong_datatype,
)
from serving.tokens import ANONYMOUS, Clients, bearer_token
from serving.versions import ServedModel

_log = logging.getLogger("kway.serving")
_SPARE_CALLS = 64
# Methods that reveal nothing about the model, so they do not require a token.
_OPEN = ("ServerLive", "ServerReady", "Check")
# The services whose health can be checked. "" is the whole server.
_SERVICES = ("", SERVICE)
_STATUS = grpc.StatusCode
_CODES = {
    400: _STATUS.INVALID_ARGUMENT,
    401: _STATUS.UNAUTHENTICATED,
    404: _STATUS.NOT_FOUND,
    413: _STATUS.RESOURCE_EXHAUSTED,
    422: _STATUS.INVALID_ARGUMENT,
    429: _STATUS.RESOURCE_EXHAUSTED,
    503: _STATUS.UNAVAILABLE,
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

    @property
    def _model(self) -> InferenceModel:
        """The current version of the model."""
        return InferenceModel(self._served.current.service)

    async def call(self, method: str, raw: bytes, context: Context) -> Message:
        """Return the response to `raw`, which is a request to `method`. If it fails, set a status
        in `context` and return an empty message.

        Exceptions other than cancellation are caught, because gRPC would show them to clients.
        """
        try:
            client = ANONYMOUS if method in _OPEN else self._client(context)
            return await _METHODS[method](self, raw, client)
        except Exception as error:
            _set_error(context, method, error)
        return pb.ModelInferResponse()  # not sent, because there is an error status

    def _client(self, context: Context) -> str:
        """Return the client of a call. Raises ApiError if its token is missing or wrong."""
        metadata = [(name, value) for name, value in context.invocation_metadata()]
        addresses = [value for name, value in metadata if name == self._clients.address_header]
        return self._clients.client_of(_token(metadata), addresses)

    async def check_health(self, raw: bytes, _: str) -> Message:
        service = parsed(HealthCheckRequest, raw).service
        if service not in _SERVICES:
            known = ", ".join(map(repr, _SERVICES))
            raise ApiError(404, "unknown_service", f"unknown service. Known services: {known}")
        is_ready = self._model.is_ready()
        return HealthCheckResponse(status="SERVING" if is_ready else "NOT_SERVING")

    async def server_live(self, _: bytes, __: str) -> Message:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, _: bytes, __: str) -> Message:
        return pb.ServerReadyResponse(ready=self._model.is_ready())

    async def server_metadata(self, _: bytes, __: str) -> Message:
        return pb.ServerMetadataResponse(
            name=SERVER_NAME, version=server_version(), extensions=EXTENSIONS
        )

    async def model_ready(self, raw: bytes, _: str) -> Message:
        request = parsed(pb.ModelReadyRequest, raw)
        model = self._model
        model.check(request.name, request.version)
        return pb.ModelReadyResponse(ready=model.is_ready())

    async def model_metadata(self, raw: bytes, _: str) -> Message:
        request = parsed(pb.ModelMetadataRequest, raw)
        model = self._model
        model.check(request.name, request.version)
        return pb.ModelMetadataResponse(
            name=model.name,
            platform=PLATFORM,
            inputs=metadata_of(model.inputs),
            outputs=metadata_of(model.outputs),
        )

    async def model_infer(self, raw: bytes, client: str) -> Message:
        model = self._model
        service = model.service
        limit = service.config.max_body_bytes
        async with service.admitted(client) as progress:
            progress.acquire_slot()
            if len(raw) > limit:
                message = f"the message is larger than {limit} bytes. Split the request"
                raise ApiError(413, "body_too_large", message)
            with service.uploads.held(client, len(raw)):
                most = _max_values(service.config)
                request, inference = await service.in_thread(_read, raw, most)
                model.check(request.model_name, request.model_version)
                outputs, answer = await model.infer(inference)
            progress.inputs = len(answer.results)
        response = response_of(request, outputs, parameters_of(answer))
        response.model_version = model.version
        return response


_METHODS: dict[str, Callable[[InferenceMethods, bytes, str], Awaitable[Message]]] = {
    "Check": InferenceMethods.check_health,
    "ServerLive": InferenceMethods.server_live,
    "ServerReady": InferenceMethods.server_ready,
    "ServerMetadata": InferenceMethods.server_metadata,
    "ModelReady": InferenceMethods.model_ready,
    "ModelMetadata": InferenceMethods.model_metadata,
    "ModelInfer": InferenceMethods.model_infer,
}


def _max_values(limits: ServingConfig) -> int:
    """Return the maximum number of values in a message. A packed number takes up to ten bytes, and
    `check_count` counts each byte as a value."""
    return MAX_VALUES + 10 * (limits.max_inputs + limits.max_classes)


def grpc_server(methods: InferenceMethods, config: ServingConfig) -> grpc.aio.Server:
    """Return a server for `methods` on the gRPC port of `config`. Call this on the event loop of
    the service."""
    # A response takes a few KiB, even if the limit on requests is smaller.
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", max(config.max_body_bytes, 2**20))],
        maximum_concurrent_rpcs=config.max_requests + _SPARE_CALLS,
    )
    add_methods_to_server(Servicer(methods), server)
    host = f"[{config.host}]" if ":" in config.host else config.host
    server.add_insecure_port(f"{host}:{config.grpc_port}")
    return server


def _read(raw: bytes, most: int) -> tuple[pb.ModelInferRequest, Inference]:
    request = parsed(pb.ModelInferRequest, raw, most)
    return request, inference_of(request, most)


def _token(metadata: Sequence[tuple[str, Any]]) -> str | None:
    """Return the bearer token of a call, or None if there is not exactly one."""
    found = [value for name, value in metadata if name == "authorization"]
    return bearer_token(found[0]) if len(found) == 1 else None


def _set_error(context: Context, method: str, error: Exception) -> None:
    """Set the status of a failed call. Internal errors are logged, but not shown to the client."""
    if isinstance(error, ApiError):
        code = _CODES.get(error.status, _STATUS.UNKNOWN)
        _set_status(context, code, str(error), error.headers or {})
    else:
        _log.exception("%s failed", method, exc_info=error)
        _set_status(context, _STATUS.INTERNAL, "internal server error; see the server log", {})


def _set_status(
    context: Context, code: grpc.StatusCode, message: str, headers: Mapping[str, str]
) -> None:
    context.set_code(code)
    # The message may quote client input, which may contain lone surrogates.
    plain = message.encode("utf-8", "backslashreplace").decode("utf-8")
    context.set_details(plain[:_MAX_DETAILS_CHARS])
    if "Retry-After" in headers:
        context.set_trailing_metadata([("retry-after", headers["Retry-After"])])


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
