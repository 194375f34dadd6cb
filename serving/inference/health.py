"""`grpc.health.v1`: the health of the server, for probes, load balancers and gRPC clients.

The service "" is the whole server.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from serving.api_error import ApiError
from serving.inference.protobuf import parsed
from serving.limits import ClientLimit

# A client keeps a `Watch` call open as long as it is connected. Ray and HAProxy count these calls
# in addition to requests.
MAX_WATCHES, _MAX_WATCHES_PER_CLIENT = 64, 32
_POLL_SECONDS = 1.0
_Status = HealthCheckResponse.ServingStatus


class Health:
    """The health of `services` and of the whole server. `is_ready` returns whether they serve."""

    def __init__(self, is_ready: Callable[[], bool], services: tuple[str, ...]) -> None:
        self._is_ready, self._services = is_ready, ("", *services)
        self._limit = ClientLimit(MAX_WATCHES, "health watches", per_client=_MAX_WATCHES_PER_CLIENT)

    def check(self, raw: bytes) -> HealthCheckResponse:
        """Return the status of a service. Raises ApiError 404 if the service is unknown."""
        status = self._status(_service_of(raw))
        if status == _Status.SERVICE_UNKNOWN:
            known = ", ".join(map(repr, self._services))
            raise ApiError(404, "unknown_service", f"unknown service. Known services: {known}")
        return HealthCheckResponse(status=status)

    async def watch(self, raw: bytes, client: str) -> AsyncGenerator[HealthCheckResponse, None]:
        """Yield the status of a service, now and whenever it changes. Raises ApiError 429 if there
        are too many watches."""
        service, last = _service_of(raw), None
        with self._limit.slot(client):
            while True:
                status = self._status(service)
                if status != last:
                    yield HealthCheckResponse(status=status)
                last = status
                await asyncio.sleep(_POLL_SECONDS)

    def _status(self, service: str) -> int:
        if service not in self._services:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._is_ready() else _Status.NOT_SERVING


def _service_of(raw: bytes) -> str:
    request: HealthCheckRequest = parsed(HealthCheckRequest, raw)
    return request.service
