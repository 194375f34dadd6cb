"""Statistics of the model in one replica: requests, batches, and the time they spent in each stage.

Each name below is a metric of the server (`serving/deploy/metrics.py`), so the statistics of all
replicas can be read from the page at /metrics (`serving/inference/statistics.py`).
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

REQUESTS = "kway_model_requests_total"
INPUTS = "kway_model_inputs_total"
SECONDS = "kway_model_seconds_total"
BATCHES = "kway_model_batches_total"
BATCH_SECONDS = "kway_model_batch_seconds_total"
LAST_SECONDS = "kway_model_last_request_timestamp_seconds"
# Metric -> the labels besides `model`, and the description.
SERIES: dict[str, tuple[tuple[str, ...], str]] = {
    REQUESTS: (
        ("result",),
        "Number of requests whose inputs were passed to the model, by result: success or fail.",
    ),
    INPUTS: ((), "Number of inputs of successful requests."),
    SECONDS: (
        ("stage",),
        "Time in seconds: of all requests by result (success, fail), and of successful requests "
        "by stage (queue, compute_input, compute_infer, compute_output).",
    ),
    BATCHES: (("batch_size",), "Number of forward passes by their number of inputs."),
    BATCH_SECONDS: (
        ("batch_size", "stage"),
        "Time in seconds of the forward passes by their number of inputs and by stage.",
    ),
    LAST_SECONDS: ((), "Time of the last request, in seconds since the epoch."),
}
RESULTS = ("success", "fail")
_NANOSECONDS = 1e9


class BatchTimes(NamedTuple):
    """Times of one batch in nanoseconds: decoding, the forward pass, and computing the answers."""

    compute_input: int
    compute_infer: int
    compute_output: int

    def plus(self, other: "BatchTimes") -> "BatchTimes":
        return BatchTimes(self[0] + other[0], self[1] + other[1], self[2] + other[2])


NO_TIMES = BatchTimes(0, 0, 0)
STAGES = ("queue", *BatchTimes._fields)


class ModelStatistics:
    """Counts of one replica. One thread adds to them; others may call `series`."""

    def __init__(self) -> None:
        self._requests = dict.fromkeys(RESULTS, 0)
        self._ns = dict.fromkeys((*RESULTS, "queue"), 0)
        self._times = NO_TIMES
        self._batches: dict[int, tuple[int, BatchTimes]] = {}
        self._inputs, self._last_seconds = 0, 0.0

    def add_batch(self, size: int, times: BatchTimes) -> None:
        """Add a successful forward pass of `size` inputs."""
        count, before = self._batches.get(size, (0, NO_TIMES))
        self._batches[size] = count + 1, before.plus(times)

    def add_success(self, *, inputs: int, ns: int, times: BatchTimes) -> None:
        """Add a request that took `ns` in total. `times` are those of its batches; the remaining
        time was spent in the queue."""
        self._add("success", ns)
        self._inputs += inputs
        self._times = self._times.plus(times)
        self._ns["queue"] += max(0, ns - sum(times))

    def add_failure(self, ns: int) -> None:
        """Add a request that failed or that did not fit into the queue."""
        self._add("fail", ns)

    def _add(self, result: str, ns: int) -> None:
        self._requests[result] += 1
        self._ns[result] += ns
        self._last_seconds = time.time()

    def series(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yield the name, labels and value of each metric, without the label `model`."""
        for result, count in self._requests.items():
            yield REQUESTS, {"result": result}, count
        yield INPUTS, {}, self._inputs
        for stage, ns in {**self._ns, **self._times._asdict()}.items():
            yield SECONDS, {"stage": stage}, ns / _NANOSECONDS
        for size, (count, times) in self._batches.copy().items():
            yield BATCHES, {"batch_size": str(size)}, count
            for stage, ns in times._asdict().items():
                labels = {"batch_size": str(size), "stage": stage}
                yield BATCH_SECONDS, labels, ns / _NANOSECONDS
        yield LAST_SECONDS, {}, self._last_seconds
