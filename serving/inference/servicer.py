"""The gRPC service of the Open Inference Protocol: its methods, and how they are registered.

Ray and grpcio call the methods by their names in the protocol. Requests are passed as bytes, so
that they are parsed only after the token has been checked. Methods that are not registered here,
including streaming methods, return UNIMPLEMENTED. This module does not import torch, because Ray's
gRPC proxy imports it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"
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


class Methods(Protocol):
    """The methods of the service."""

    async def call(self, method: str, raw: bytes, context: Context) -> Message:
        """Return the response to `raw`, which is a request to `method`."""
        ...


class Servicer:
    """Passes calls to `methods`."""

    def __init__(self, methods: Methods) -> None:
        self._methods = methods

    async def ServerLive(self, raw: bytes, grpc_context: Context) -> Message:  # noqa: N802
        return await self._methods.call("ServerLive", raw, grpc_context)

    async def ServerReady(self, raw: bytes, grpc_context: Context) -> Message:  # noqa: N802
        return await self._methods.call("ServerReady", raw, grpc_context)

    async def ServerMetadata(self, raw: bytes, grpc_context: Context) -> Message:  # noqa: N802
        return await self._methods.call("ServerMetadata", raw, grpc_context)

    async def ModelReady(self, raw: bytes, grpc_context: Context) -> Message:  # noqa: N802
        return await self._methods.call("ModelReady", raw, grpc_context)

    async def ModelMetadata(self, raw: bytes, grpc_context: Context) -> Message:  # noqa: N802
        return await self._methods.call("ModelMetadata", raw, grpc_context)

    async def ModelInfer(self, raw: bytes, grpc_context: Context) -> Message:  # noqa: N802
        return await self._methods.call("ModelInfer", raw, grpc_context)

    async def Check(self, raw: bytes, grpc_context: Context) -> Message:  # noqa: N802
        return await self._methods.call("Check", raw, grpc_context)


def add_methods_to_server(servicer: Any, server: grpc.Server) -> None:
    """Register the methods, like `add_…Servicer_to_server` in generated code."""

    def serialize(message: Message) -> bytes:  # Ray replaces it by its own
        return message.SerializeToString()

    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            getattr(servicer, name), response_serializer=serialize
        )
        for name in (*_METHODS, "Check")
    }
    of_health = {"Check": handlers.pop("Check")}
    for service, found in ((SERVICE, handlers), (HEALTH_SERVICE, of_health)):
        # One at a time, because Ray registers only the first handler of a call.
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, found),))
