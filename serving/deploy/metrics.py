"""Metrics of a replica, recorded with `ray.serve.metrics`; Ray's agent on each node exports them.

A prometheus_client registry inside a replica would report only that replica. The page that shows
the metrics is `serving/deploy/metrics_page.py`, which does not import Ray.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from threading import Thread

import ray
from ray.serve.metrics import Counter, Gauge, Histogram

from serving.deploy.metrics_page import EXACT_SECONDS
from trainer.bundle.spec import LossSpec

_REPORT_SECONDS = 5.0
_SUM_SECONDS = 0.3
_SECONDS_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30]


class QueryMetrics:
    """Counters of one replica. Create an instance inside the replica and use it from its event
    loop.

    Each call of Ray's counters takes as long as parsing a request, so the counts of a short period
    are added together. The histogram has no such option.
    """

    def __init__(self) -> None:
        self._outcomes: dict[str, int] = defaultdict(int)
        self._sums: dict[Counter, float] = defaultdict(float)
        self._is_scheduled = False
        self._requests = Counter(
            "kway_query_requests_total",
            description="Number of requests to /v1/query by outcome: ok or the error code.",
            tag_keys=("outcome",),
        )
        self._inputs = Counter("kway_query_inputs_total", description="Number of inputs answered.")
        self._seconds = Histogram(
            "kway_query_seconds",
            description="Time in seconds from the headers of a request to its response; "
            "includes rejected requests but not streams.",
            boundaries=_SECONDS_BUCKETS,
        )
        self._exact_seconds = Counter(EXACT_SECONDS, description="Sum of kway_query_seconds.")

    def count(self, *, outcome: str, inputs: int, seconds: float | None) -> None:
        """Count one finished request. If `seconds` is None, the request is excluded from the
        histogram."""
        self._outcomes[outcome] += 1
        self._sums[self._inputs] += inputs
        if seconds is not None:
            self._seconds.observe(seconds)
            self._sums[self._exact_seconds] += seconds
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(_SUM_SECONDS, self._record_sums)

    def _record_sums(self) -> None:
        self._is_scheduled = False
        for outcome, count in self._outcomes.items():
            self._requests.inc(count, tags={"outcome": outcome})
        for counter, total in self._sums.items():
            if total:  # Ray rejects 0
                counter.inc(total)
        self._outcomes.clear()
        self._sums.clear()


class ReplicaMetrics:
    """Gauges of one replica: its model and its current load.

    Ray's agent drops a gauge that has not been set recently, so a thread of the replica sets the
    gauges periodically. Ray's health checks could not do this: they stop while the head node of a
    cluster is down, even though the replicas still answer requests.
    """

    def __init__(
        self,
        loss: LossSpec,
        load: Callable[[], tuple[int, int]],
        monitored: Callable[[], tuple[int, int]],
    ) -> None:
        """`load` returns the number of requests in progress and the number of waiting inputs.
        `monitored` returns how many classes are monitored for drift, and how many have drifted.
        Both are called from another thread."""
        self._aligned = Gauge(
            "kway_model_aligned",
            description="1 if the model's loss follows the Principle of Logit Separation, else 0.",
            tag_keys=("loss",),
        )
        self._requests = Gauge(
            "kway_requests_in_progress",
            description="Number of requests that a replica is processing.",
        )
        self._queued = Gauge(
            "kway_queued_inputs", description="Number of inputs waiting for the model of a replica."
        )
        self._monitored_classes = Gauge(
            "kway_monitored_classes",
            description="Number of classes and thresholds that a replica monitors for drift.",
        )
        self._drifted_classes = Gauge(
            "kway_drifted_classes",
            description="Number of monitored classes whose share of passing inputs left the "
            "expected interval in the last period.",
        )
        self._loss, self._load, self._monitored = loss, load, monitored

    def start(self) -> None:
        """Start a thread that sets the gauges every few seconds."""
        Thread(target=self._report_forever, name="metrics", daemon=True).start()

    def _report_forever(self) -> None:
        while True:
            requests, inputs = self._load()
            self._aligned.set(int(self._loss.aligned), tags={"loss": self._loss.kind})
            self._requests.set(requests)
            self._queued.set(inputs)
            monitored, drifted = self._monitored()
            self._monitored_classes.set(monitored)
            self._drifted_classes.set(drifted)
            time.sleep(_REPORT_SECONDS)


class WatchMetrics:
    """Frame and hit counters of one replica."""

    def __init__(self) -> None:
        self._frames = Counter(
            "kway_feed_frames_total",
            description="Number of frames by outcome: ok, unwatched, dropped or the error code.",
            tag_keys=("outcome",),
        )
        self._hits = Counter("kway_watch_hits_total", description="Number of hits of all watches.")
        self._lost = Counter(
            "kway_watch_lost_hits_total",
            description="Number of hits that were dropped before a listener received them.",
        )
        self._watches = Gauge(
            "kway_watches",
            description="Number of watches known to a replica, if it receives frames.",
        )

    def count_frame(self, outcome: str) -> None:
        self._frames.inc(1, tags={"outcome": outcome})

    def count_hits(self, count: int) -> None:
        if count:
            self._hits.inc(count)

    def count_lost_hits(self, count: int) -> None:
        if count:
            self._lost.inc(count)

    def set_watches(self, count: int) -> None:
        self._watches.set(count)


class HttpErrorMetrics:
    """Counter of the HTTP errors that clients receive from HAProxy, Ray or kway."""

    def __init__(self) -> None:
        self._errors = Counter(
            "kway_http_errors_total",
            description="Number of HTTP responses with status 400 or higher, including "
            "those of the proxy.",
            tag_keys=("status",),
        )

    def count(self, status: str) -> None:
        self._errors.inc(1, tags={"status": status})


def agent_pages() -> list[str]:
    """Return the URLs of the metrics pages of Ray's agents, one per node. Blocks; call it only in a
    process that is connected to Ray."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"]
    ]
