"""Metrics of a replica, recorded with `ray.serve.metrics`; Ray's agent on each node exports them.

A prometheus_client registry inside a replica would report only that replica. The page that shows
the metrics is `serving/deploy/metrics_page.py`, which does not import Ray.
"""

import asyncio
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate
from threading import Thread
from typing import TYPE_CHECKING

import ray
from prometheus_client.utils import floatToGoString
from ray.serve.metrics import Counter, Gauge

from serving.deploy.error_reports import HttpError
from serving.deploy.metrics_page import BUCKETS, QUERY_SECONDS

if TYPE_CHECKING:  # imports torch, which the `kway serve` process does not need
    from serving.models.served import ReplicaState

_REPORT_SECONDS, _SUM_SECONDS = 5.0, 0.3


class QueryMetrics:
    """Counters of one replica. Create an instance inside the replica and use it from its event
    loop.

    Each call of Ray's metrics takes as long as parsing a request, so the counts of a short period
    are added together. Ray's histograms have no such option, and Ray only estimates their sums.
    `serving/deploy/metrics_page.py` joins the counters of the histogram.
    """

    def __init__(self) -> None:
        self._outcomes: dict[str, int] = defaultdict(int)
        self._num_inputs, self._sum_seconds = 0, 0.0
        self._in_buckets = [0] * len(BUCKETS)
        self._is_scheduled = False
        self._requests = Counter(
            "kway_query_requests_total",
            description="Number of requests by outcome: ok or the error code.",
            tag_keys=("outcome",),
        )
        self._inputs = Counter("kway_query_inputs_total", description="Number of inputs answered.")
        self._bucket = Counter(f"{QUERY_SECONDS}_bucket", tag_keys=("le",))
        self._count = Counter(f"{QUERY_SECONDS}_count")
        self._sum = Counter(f"{QUERY_SECONDS}_sum")

    def count(self, *, outcome: str, inputs: int, seconds: float) -> None:
        """Count one finished request."""
        self._outcomes[outcome] += 1
        self._num_inputs += inputs
        self._in_buckets[bisect_left(BUCKETS, seconds)] += 1
        self._sum_seconds += seconds
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(_SUM_SECONDS, self._record)

    def _record(self) -> None:
        self._is_scheduled = False
        for outcome, count in self._outcomes.items():
            self._requests.inc(count, tags={"outcome": outcome})
        _add(self._inputs, self._num_inputs)
        for end, count in zip(BUCKETS, accumulate(self._in_buckets), strict=True):
            _add(self._bucket, count, le=floatToGoString(end))
        _add(self._count, sum(self._in_buckets))
        _add(self._sum, self._sum_seconds)
        self._outcomes.clear()
        self._num_inputs, self._sum_seconds = 0, 0.0
        self._in_buckets = [0] * len(BUCKETS)


def _add(counter: Counter, value: float, **tags: str) -> None:
    if value:  # Ray rejects 0
        counter.inc(value, tags=tags)


# Below, type checks are ignored where there are several `tag_keys`: Ray declares them as a tuple of
# one string, but it accepts any number.
class ReloadMetrics:
    """Counter of the published versions that a replica has loaded or rejected."""

    def __init__(self) -> None:
        self._reloads = Counter(
            "kway_reloads_total",
            description="Number of published versions by outcome: switched or failed.",
            tag_keys=("model", "outcome"),  # type: ignore[arg-type]
        )

    def count_reload(self, model: str, outcome: str) -> None:
        self._reloads.inc(1, tags={"model": model, "outcome": outcome})


class ReplicaMetrics:
    """Gauges of one replica: its model and its current load.

    Ray's agent drops a gauge that has not been set recently, so a thread of the replica sets the
    gauges periodically. Ray's health checks could not do this: they stop while the head node of a
    cluster is down, even though the replicas still answer requests.
    """

    def __init__(self, state: "Callable[[], ReplicaState]") -> None:
        """`state` is called from another thread."""
        self._aligned = Gauge(
            "kway_model_aligned",
            description="1 if the model's loss is aligned with the Principle of Logit Separation.",
            tag_keys=("model", "loss"),  # type: ignore[arg-type]
        )
        self._versions = Gauge(
            "kway_model_version",
            description="1 for the version of a model that a replica serves, 0 for earlier ones.",
            tag_keys=("model", "version"),  # type: ignore[arg-type]
        )
        self._rejected = Gauge(
            "kway_model_rejected",
            description="1 while a version of a model is published that a replica cannot serve.",
            tag_keys=("model",),
        )
        self._requests = Gauge(
            "kway_requests_in_progress",
            description="Number of requests that a replica is processing.",
        )
        self._queued = Gauge(
            "kway_queued_inputs", description="Number of inputs waiting for the model of a replica."
        )
        self._state = state
        self._reported: str | None = None

    def start(self) -> None:
        """Start a thread that sets the gauges every few seconds."""
        Thread(target=self._report_forever, name="metrics", daemon=True).start()

    def _report_forever(self) -> None:
        while True:
            state = self._state()
            self._requests.set(state.requests)
            self._queued.set(state.queued_inputs)
            name, version, loss = state.name, state.version, state.loss
            self._rejected.set(int(state.is_rejected), tags={"model": name})
            self._aligned.set(int(loss.aligned), tags={"model": name, "loss": loss.kind})
            if self._reported not in (None, version):
                self._versions.set(0, tags={"model": name, "version": self._reported})
            self._versions.set(1, tags={"model": name, "version": version})
            self._reported = version
            time.sleep(_REPORT_SECONDS)


class HttpErrorMetrics:
    """Counter of the HTTP errors that clients receive from HAProxy, Ray or kway.

    HAProxy replaces Ray's own responses, so their source is the proxy.
    """

    def __init__(self) -> None:
        self._errors = Counter(
            "kway_http_errors_total",
            description="Number of HTTP responses with status 400 or higher, including "
            "those of the proxy.",
            tag_keys=HttpError._fields,  # type: ignore[arg-type]
        )

    def count(self, error: HttpError) -> None:
        self._errors.inc(1, tags=error._asdict())


def agent_pages() -> list[str]:
    """Return the URLs of the metrics pages of Ray's agents, one per node. Blocks; call it only in a
    process that is connected to Ray."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"]
    ]
