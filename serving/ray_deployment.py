"""The Ray Serve deployment, and the exporter of its metrics.

Importing this module imports Ray, so set Ray's environment variables first (`serving/on_ray.py`).
It does not import torch, because the `kway serve` process and Ray's controller import it too.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, BackpressureConfig
from ray.serve.metrics import Counter, Gauge, Histogram
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp

from serving.config import ServingConfig
from serving.inference.servicer import Servicer
from serving.metrics import BUCKETS, METRICS, RECORDED_BY, Metric

if TYPE_CHECKING:
    from serving.replica import Replica

# Requests that count towards no limit of kway, such as rejected ones.
_SPARE_REQUESTS = 64
LOGGING = LoggingConfig(log_level="WARNING", enable_access_log=False)


class RayExporter:
    """Exports metrics with `ray.serve.metrics`. Create it inside a replica."""

    def __init__(self) -> None:
        self._metrics = {metric: _collector(metric) for metric in METRICS}

    def record(self, metric: Metric, value: float, **labels: str) -> None:
        getattr(self._metrics[metric], RECORDED_BY[metric.kind])(value, tags=labels)


def _collector(metric: Metric) -> Any:
    kind: Any = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}[metric.kind]
    options = {"boundaries": list(BUCKETS)} if metric.kind == "histogram" else {}
    return kind(metric.name, description=metric.description, tag_keys=metric.labels, **options)


class _Process:
    """The replica of this process."""

    replica: "Replica"


def _app() -> ASGIApp:
    return _Process.replica.app


@serve.deployment
@serve.ingress(_app)  # called after the constructor
class Kway(Servicer):
    """A replica. It opens the bundle by path, so weights are not sent through Ray."""

    def __init__(self, bundle: str, config: dict[str, Any]) -> None:
        from serving.replica import Replica  # imports torch

        checked = ServingConfig.model_validate(config)
        _Process.replica = Replica(Path(bundle), checked, RayExporter())
        super().__init__(_Process.replica.methods.call)

    def check_health(self) -> None:
        """Ray calls this every few seconds and replaces the replica if it raises an exception."""
        if not _Process.replica.model.current.service.is_healthy():
            raise RuntimeError("a forward pass has hung")


def application(bundle: str, config: ServingConfig, *, grace_seconds: float) -> Application:
    """Return the application for `serve.run`, with all of Ray's limits set explicitly.

    `bundle` is a path that every node of the cluster can open. `grace_seconds` limits how long a
    replica may take at shutdown to finish the requests in progress; an idle replica stops
    immediately.
    """
    # kway's own limits are reached first, so that its errors have one format. Ray counts a request
    # as queued until a replica has accepted it, so a burst must fit into the queue.
    most = config.max_requests + config.max_uploads + _SPARE_REQUESTS
    return Kway.options(  # type: ignore[attr-defined]
        **_replicas(config),
        ray_actor_options={"num_cpus": 1, "num_gpus": int(config.device == "cuda")},
        max_ongoing_requests=most,
        max_queued_requests=most,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=grace_seconds,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5,
        health_check_timeout_s=30,
        logging_config=LOGGING,
    ).bind(bundle, config.model_dump(mode="json"))


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
