"""The metrics of a replica. Each is declared once and exported by prometheus_client or by Ray.

Without Ray, `GET /metrics` returns them (`Prometheus`). Ray collects the metrics of all replicas
itself and adds the prefix `ray_` to their names (`serving/on_ray.py`).
"""

import os
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

if TYPE_CHECKING:  # imports torch
    from trainer.bundle.bundle import Bundle

# prometheus_client reads this variable when it is imported. If it is set, the metrics of all worker
# processes are in files in this folder.
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class Metric(NamedTuple):
    """A metric that a server exports."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    description: str
    labels: tuple[str, ...] = ()


REQUESTS = Metric(
    "counter",
    "kway_query_requests_total",
    "Number of requests by outcome: ok or the error code.",
    ("outcome",),
)
INPUTS = Metric("counter", "kway_query_inputs_total", "Number of inputs answered.")
SECONDS = Metric(
    "histogram",
    "kway_query_seconds",
    "Time in seconds from the headers of a request to its response, also of rejected requests.",
)
RELOADS = Metric(
    "counter",
    "kway_reloads_total",
    "Number of published versions by outcome: switched or failed.",
    ("model", "outcome"),
)
ALIGNED = Metric(
    "gauge",
    "kway_model_aligned",
    "1 if the model's loss is aligned with the Principle of Logit Separation.",
    ("model", "loss"),
)
VERSION = Metric(
    "gauge",
    "kway_model_version",
    "1 for the version of a model that a replica serves, 0 for earlier ones.",
    ("model", "version"),
)
REJECTED = Metric(
    "gauge",
    "kway_model_rejected",
    "1 while a version of a model is published that a replica cannot serve.",
    ("model",),
)
IN_PROGRESS = Metric(
    "gauge", "kway_requests_in_progress", "Number of requests that a replica is processing."
)
QUEUED = Metric(
    "gauge", "kway_queued_inputs", "Number of inputs waiting for the model of a replica."
)
METRICS = (REQUESTS, INPUTS, SECONDS, RELOADS, ALIGNED, VERSION, REJECTED, IN_PROGRESS, QUEUED)
# The method of a metric that records a value, in prometheus_client and in Ray.
RECORDED_BY = {"counter": "inc", "gauge": "set", "histogram": "observe"}
# The upper ends of the buckets of histograms, in seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Exporter(Protocol):
    """Records values of metrics. Threads may call it concurrently."""

    def record(self, metric: Metric, value: float, **labels: str) -> None:
        """Add to a counter, set a gauge, or observe a value of a histogram."""
        ...


class Metrics:
    """Records the metrics of one replica."""

    def __init__(self, exporter: Exporter) -> None:
        self._record = exporter.record
        self._reported: str | None = None

    def count(self, *, outcome: str, inputs: int, seconds: float) -> None:
        """Count one finished request."""
        self._record(REQUESTS, 1, outcome=outcome)
        self._record(SECONDS, seconds)
        if inputs:
            self._record(INPUTS, inputs)

    def count_reload(self, model: str, outcome: Literal["switched", "failed"]) -> None:
        self._record(RELOADS, 1, model=model, outcome=outcome)

    def report(
        self, name: str, bundle: "Bundle", *, is_rejected: bool, requests: int, queued_inputs: int
    ) -> None:
        """Set the gauges. Call this every few seconds, because Ray drops a gauge that has not been
        set recently."""
        loss, version = bundle.spec.loss, bundle.version
        self._record(IN_PROGRESS, requests)
        self._record(QUEUED, queued_inputs)
        self._record(REJECTED, int(is_rejected), model=name)
        self._record(ALIGNED, int(loss.aligned), model=name, loss=loss.kind)
        if self._reported not in (None, version):
            self._record(VERSION, 0, model=name, version=str(self._reported))
        self._record(VERSION, 1, model=name, version=version)
        self._reported = version


class Prometheus:
    """Exports metrics with prometheus_client, also those of the other workers if there are any."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics = {metric: self._collector(metric) for metric in METRICS}

    def _collector(self, metric: Metric) -> Any:
        kind: Any = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}[metric.kind]
        # Gauges tell workers apart, like Ray's replicas.
        options: dict[str, dict[str, Any]] = {
            "gauge": {"multiprocess_mode": "liveall"},
            "histogram": {"buckets": BUCKETS},
        }
        given = (metric.name, metric.description, metric.labels)
        return kind(*given, registry=self._registry, **options.get(metric.kind, {}))

    def record(self, metric: Metric, value: float, **labels: str) -> None:
        found = self._metrics[metric]
        getattr(found.labels(**labels) if labels else found, RECORDED_BY[metric.kind])(value)

    def page(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        if FOLDER_VARIABLE not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return generate_latest(registry)
