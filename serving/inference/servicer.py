"""The gRPC service of the Open Inference Protocol: its methods, and how they are registered.

Ray and grpcio call the methods by their names in the protocol. Requests are passed as bytes, so
that they are parsed only after the token has been checked. Methods that are not registered here,
including streaming methods, return UNIMPLEMENTED. This module does not import torch, because Ray's
gRPC proxy imports it.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

_SERVICE = "inference.GRPCInferenceService"
_METHODS = (
    "ServerLive",
    "ServerReady",
    "ServerMetadata",
    "ModelReady",
    "ModelMetadata",
    "ModelInfer",
)


class Context(Protocol):
    """The context of one call. The context classes of both Ray and grpc implement this protocol."""

    def invocation_metadata(self) -> Sequence[tuple[str, Any]]: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None: ...


def _method(name: str) -> Callable[["Servicer", bytes, Context], Awaitable[Message]]:
    # Ray passes the context to methods with a parameter of this name.
    async def method(self: "Servicer", raw: bytes, grpc_context: Context) -> Message:
        return await self._call(name, raw, grpc_context)

    return method


class Servicer:
    """Passes each call to `call(method, raw, context)`, which returns the response to it."""

    def __init__(self, call: Callable[[str, bytes, Context], Awaitable[Message]]) -> None:
        self._call = call


for _name in _METHODS:
    setattr(Servicer, _name, _method(_name))


def add_methods_to_server(servicer: Any, server: grpc.Server) -> None:
    """Register the methods, like `add_…Servicer_to_server` in generated code."""

    def serialize(message: Message) -> bytes:  # Ray replaces it by its own
        return message.SerializeToString()

    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            getattr(servicer, name), response_serializer=serialize
        )
        for name in _METHODS
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
