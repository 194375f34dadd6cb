"""The Ray Serve application: ingress and model in one deployment, replicas without state.

Importing this module imports Ray; `serving/deploy/environment.py` sets Ray's environment first.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import ray
import torch
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, BackpressureConfig
from ray.serve.schema import LoggingConfig

from serving.config import ServingConfig
from serving.deploy.bodies import bound_bodies
from serving.deploy.log import append_errors
from serving.deploy.loopback import keep_grpc_servers_on_loopback
from serving.deploy.metrics import QueryMetrics, WatchMetrics, agent_pages
from serving.deploy.metrics_page import exposition
from serving.http.app import build_api
from serving.model import Model
from serving.service import Service
from serving.watches.actor import RayWatches

# Our own limit answers first, with the one shape of errors; Ray's stands behind it.
_SPARE_REQUESTS = 64
_GRACE_SECONDS = 10


@serve.deployment
@serve.ingress()
class Kway:
    """A replica: opens the bundle by its path, so that no weights travel through Ray."""

    def __init__(self, bundle: str, config: dict[str, Any], errors: str | None) -> None:
        if errors is not None:
            append_errors(Path(errors))
        if ray.util.get_node_ip_address() == "127.0.0.1":
            keep_grpc_servers_on_loopback()
        bound_bodies()
        checked = ServingConfig.model_validate(config)
        threads = checked.threads or max(1, (os.cpu_count() or 1) // checked.most_replicas)
        torch.set_num_threads(threads)  # before the model: it may start threads of its own
        checked = checked.model_copy(update={"threads": threads})
        model = Model.open(Path(bundle), max_pixels=checked.max_pixels, device=checked.device)
        self._service = Service(model, checked, QueryMetrics())
        self._watches, self._watch_counts = RayWatches(checked), WatchMetrics()

    def __serve_build_asgi_app__(self) -> FastAPI:
        async def metrics() -> bytes:
            return await exposition(await asyncio.to_thread(agent_pages))

        return build_api(self._service, metrics, self._watches, self._watch_counts)

    def check_health(self) -> None:
        """Ray asks this every few seconds and replaces a replica that raises."""
        self._service.check_health()


def application(bundle: str, config: ServingConfig, errors: Path | None) -> Application:
    """The application for `serve.run`, with every limit of Ray's stated.

    `bundle` is a path that every node of the cluster can open. `errors` is the file that replicas
    append their errors to; none: Ray's logs have them.
    """
    return Kway.options(  # type: ignore[attr-defined]
        **_replicas(config),
        ray_actor_options={"num_cpus": 1, "num_gpus": int(config.device == "cuda")},
        max_ongoing_requests=config.max_requests + _SPARE_REQUESTS,
        max_queued_requests=config.max_requests,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=_GRACE_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5,
        health_check_timeout_s=30,
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    ).bind(bundle, config.model_dump(mode="json"), None if errors is None else str(errors))


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
