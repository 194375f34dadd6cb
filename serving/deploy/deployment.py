"""The Ray Serve application: ingress and model in one deployment, replicas without state.

Importing this module imports Ray; `serving/deploy/server.py` sets Ray's environment first.
"""

import asyncio
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import BackpressureConfig
from ray.serve.schema import LoggingConfig

from serving.config import ServingConfig
from serving.deploy.log import append_errors
from serving.deploy.loopback import keep_replica_port_on_loopback
from serving.deploy.metrics import QueryMetrics, agent_pages
from serving.deploy.metrics_page import exposition
from serving.http.app import build_api
from serving.model import Model
from serving.service import Service

# Our own limit answers first, with the one shape of errors; Ray's stands behind it.
_SPARE_REQUESTS = 64


@serve.deployment
@serve.ingress()
class Kway:
    """A replica: opens the bundle by its path, so that no weights travel through Ray."""

    def __init__(self, bundle: str, config: dict[str, Any], errors: str) -> None:
        append_errors(Path(errors))
        if ray.util.get_node_ip_address() == "127.0.0.1":
            keep_replica_port_on_loopback()
        checked = ServingConfig.model_validate(config)
        model = Model.open(Path(bundle), max_pixels=checked.max_pixels)
        self._service = Service(model, checked, QueryMetrics())

    def __serve_build_asgi_app__(self) -> FastAPI:
        async def metrics() -> bytes:
            return await exposition(await asyncio.to_thread(agent_pages))

        return build_api(self._service, metrics)

    def check_health(self) -> None:
        """Ray asks this every few seconds and replaces a replica that raises."""
        self._service.check_health()


def application(bundle: Path, config: ServingConfig, errors: Path) -> Application:
    """The application for `serve.run`, with every limit of Ray's stated.

    `errors` is the file that replicas append their errors to.
    """
    return Kway.options(  # type: ignore[attr-defined]
        num_replicas=config.replicas,
        ray_actor_options={"num_cpus": 1},
        max_ongoing_requests=config.max_requests + _SPARE_REQUESTS,
        max_queued_requests=config.max_requests * config.replicas,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=10,
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    ).bind(str(bundle.resolve()), config.model_dump(), str(errors))
