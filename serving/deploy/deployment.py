"""The Ray Serve application: ingress and model in one deployment, with stateless replicas.

Importing this module imports Ray, so set Ray's environment first (`serving/deploy/environment.py`).
It does not import torch, because the `kway serve` process and Ray's controller import it too.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from google.protobuf.message import Message
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, BackpressureConfig
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.schema import LoggingConfig

from serving.config import ServingConfig
from serving.deploy.error_reports import append_errors
from serving.deploy.private_ray import unhide_pandas
from serving.inference.health import MAX_WATCHES

# Spare capacity for requests that count towards no limit and are answered immediately, such as
# rejected requests.
_SPARE_REQUESTS = 64


@serve.deployment
@serve.ingress()
class Kway:
    """A replica. It opens the bundle by path, so weights are not sent through Ray."""

    def __init__(self, bundle: str, config: dict[str, Any], errors: str | None) -> None:
        if errors is not None:
            append_errors(Path(errors))
        unhide_pandas()  # a backbone may use it
        from serving.deploy.replica import Replica  # imports torch

        self._config = ServingConfig.model_validate(config)
        self._replica = Replica(Path(bundle), self._config)
        self._methods = self._replica.methods

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._replica.api(_max_ongoing_requests(self._config))

    # Ray calls these methods by their names in the protocol.

    async def ServerLive(self, raw: bytes, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        return await self._methods.call("ServerLive", raw, grpc_context)

    async def ServerReady(self, raw: bytes, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        return await self._methods.call("ServerReady", raw, grpc_context)

    async def ServerMetadata(self, raw: bytes, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        return await self._methods.call("ServerMetadata", raw, grpc_context)

    async def ModelReady(self, raw: bytes, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        return await self._methods.call("ModelReady", raw, grpc_context)

    async def ModelMetadata(self, raw: bytes, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        return await self._methods.call("ModelMetadata", raw, grpc_context)

    async def Check(self, raw: bytes, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        return await self._methods.call("Check", raw, grpc_context)

    async def Watch(  # noqa: N802
        self, raw: bytes, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Message, None]:
        async with aclosing(self._methods.watch(raw, grpc_context)) as statuses:
            async for status in statuses:
                yield status

    async def ModelInfer(self, raw: bytes, grpc_context: RayServegRPCContext) -> Message:  # noqa: N802
        return await self._methods.call("ModelInfer", raw, grpc_context)

    def check_health(self) -> None:
        """Ray calls this every few seconds and replaces the replica if it raises an exception."""
        self._replica.model.check_health()


def application(
    bundle: str, config: ServingConfig, errors: Path | None, *, grace_seconds: float
) -> Application:
    """Return the application for `serve.run`, with all of Ray's limits set explicitly.

    `bundle` is a path that every node of the cluster can open. `errors` is the file that replicas
    append their errors to; if None, errors are written only to Ray's logs. `grace_seconds` limits
    how long a replica may take at shutdown to finish the requests in progress; an idle replica
    stops immediately.
    """
    return Kway.options(  # type: ignore[attr-defined]
        **_replicas(config),
        ray_actor_options={"num_cpus": 1, "num_gpus": int(config.device == "cuda")},
        max_ongoing_requests=_max_ongoing_requests(config),
        max_queued_requests=config.max_requests,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=grace_seconds,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5,
        health_check_timeout_s=30,
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    ).bind(bundle, config.model_dump(mode="json"), None if errors is None else str(errors))


def _max_ongoing_requests(config: ServingConfig) -> int:
    """Return the limit of Ray and of `Ingress` on concurrent requests. It exceeds the sum of kway's
    own limits, so kway is the first to reject a request and all errors have the same format.

    Clients decide how long uploads and health watches last. The limits on these are included
    here, because other requests could otherwise queue behind them indefinitely.
    """
    lasting = config.max_uploads + MAX_WATCHES
    return config.max_requests + lasting + _SPARE_REQUESTS


def grpc_options(port: int) -> dict[str, Any]:
    """Return the gRPC options for Ray Serve. Only the protocol's methods are served."""
    from serving.inference.methods import add_methods_to_server

    function = f"{add_methods_to_server.__module__}.{add_methods_to_server.__name__}"
    return {"port": port, "grpc_servicer_functions": [function], "enable_reflection": False}


def _replicas(config: ServingConfig) -> dict[str, Any]:
    if config.max_replicas is None:
        return {"num_replicas": config.replicas}
    scaling = AutoscalingConfig(
        min_replicas=config.replicas,
        max_replicas=config.max_replicas,
        target_ongoing_requests=config.target_requests,
        upscale_delay_s=10,
        downscale_delay_s=300,
    )
    return {"autoscaling_config": scaling}
