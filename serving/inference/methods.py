"""The protocol's gRPC methods. Each takes the bytes of a request and returns a response or sets a
status.

Requests are passed as bytes so that they are parsed only after the token has been checked. Methods
that are not registered here, including streaming methods, return UNIMPLEMENTED.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2 as pb

from serving.api_error import ApiError
from serving.config import ServingConfig
from serving.inference.protobuf import MAX_VALUES, inference_of, metadata_of, parsed, response_of
from serving.inference.tensors import (
    EXTENSIONS,
    PLATFORM,
    SERVER_NAME,
    Inference,
    InferenceModel,
    parameters_of,
)
from serving.tokens import Clients, bearer_token

# Ray's gRPC proxy imports this module, so avoid importing torch here.
if TYPE_CHECKING:
    from serving.models.models import Models

_log = logging.getLogger("kway.serving")
SERVICE = "inference.GRPCInferenceService"
# Methods that reveal nothing about the model, so they do not require a token.
_OPEN = ("ServerLive", "ServerReady")
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


class Context(Protocol):
    """The context of one call. The context classes of both Ray and grpc implement this protocol."""

    def invocation_metadata(self) -> Sequence[tuple[str, Any]]: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None: ...


class InferenceMethods:
    """Implements the gRPC methods for `models` and authenticates `clients`."""

    def __init__(self, models: "Models", clients: Clients) -> None:
        self._models, self._clients = models, clients

    @property
    def _model(self) -> InferenceModel:
        """The current version of the default model."""
        return InferenceModel(self._models.default.current.service)

    def _named(self, name: str, version: str) -> InferenceModel:
        """Return the current version of a model. Raises ApiError 404 if it does not exist."""
        known = {model.name: model for model in self._models}
        found = InferenceModel(known.get(name, self._models.default).current.service)
        found.check(name, version)
        return found

    async def call(self, method: str, raw: bytes, context: Context) -> Message:
        """Return the response to `raw`, which is a request to `method`. If it fails, set a status
        in `context` and return an empty message.

        Exceptions other than cancellation are caught, because gRPC would show them to clients.
        """
        try:
            if method not in _OPEN:
                self._clients.name_of(_token(context))
            return await _METHODS[method](self, raw)
        except ApiError as error:
            code = _CODES.get(error.status, _STATUS.UNKNOWN)
            _set_error(context, code, str(error), error.headers or {})
        except Exception as error:  # an internal error: log it, but do not show it to the client
            _log.exception("%s failed", method, exc_info=error)
            _set_error(context, _STATUS.INTERNAL, "internal server error; see the server log", {})
        return pb.ModelInferResponse()  # not sent, because there is an error status

    async def server_live(self, _: bytes) -> Message:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, _: bytes) -> Message:
        return pb.ServerReadyResponse(ready=self._model.is_ready())

    async def server_metadata(self, _: bytes) -> Message:
        return pb.ServerMetadataResponse(
            name=SERVER_NAME, version=self._model.server_version, extensions=EXTENSIONS
        )

    async def model_ready(self, raw: bytes) -> Message:
        request = parsed(pb.ModelReadyRequest, raw)
        return pb.ModelReadyResponse(ready=self._named(request.name, request.version).is_ready())

    async def model_metadata(self, raw: bytes) -> Message:
        request = parsed(pb.ModelMetadataRequest, raw)
        model = self._named(request.name, request.version)
        return pb.ModelMetadataResponse(
            name=model.name,
            platform=PLATFORM,
            inputs=metadata_of(model.inputs),
            outputs=metadata_of(model.outputs),
        )

    async def model_infer(self, raw: bytes) -> Message:
        service = self._models.default.current.service  # all models have the same limits
        async with service.admitted() as progress:
            progress.acquire_slot()
            limit = service.config.max_body_bytes
            if len(raw) > limit:
                message = f"the message is larger than {limit} bytes. Split the request"
                raise ApiError(413, "body_too_large", message)
            most = _max_values(service.config)
            request, inference = await service.in_thread(_read, raw, most)
            model = self._named(request.model_name, request.model_version)
            outputs, answer = await model.infer(inference)
            progress.inputs = len(answer.results)
        response = response_of(request, outputs, parameters_of(answer))
        response.model_version = model.version
        return response


_METHODS: dict[str, Callable[[InferenceMethods, bytes], Awaitable[Message]]] = {
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


def add_methods_to_server(servicer: Any, server: grpc.Server) -> None:
    """Register the methods, like `add_…Servicer_to_server` in generated code."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name)) for name in _METHODS
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _read(raw: bytes, most: int) -> tuple[pb.ModelInferRequest, Inference]:
    request = parsed(pb.ModelInferRequest, raw, most)
    return request, inference_of(request, most)


def _token(context: Context) -> str | None:
    """Return the bearer token of a call, or None if there is not exactly one."""
    found = [value for name, value in context.invocation_metadata() if name == "authorization"]
    return bearer_token(found[0]) if len(found) == 1 else None


def _set_error(
    context: Context, code: grpc.StatusCode, message: str, headers: Mapping[str, str]
) -> None:
    context.set_code(code)
    # The message may quote client input, which may contain lone surrogates.
    plain = message.encode("utf-8", "backslashreplace").decode("utf-8")
    context.set_details(plain[:_MAX_DETAILS_CHARS])
    if "Retry-After" in headers:
        context.set_trailing_metadata([("retry-after", headers["Retry-After"])])
