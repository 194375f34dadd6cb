"""The page at /metrics: metrics of the entire server, fetched from Ray's agents on its nodes.

Every replica returns the metrics of all replicas. They lag by Ray's report interval
(`serving/deploy/private_ray.py` sets 1 s). Each replica has its own series, so sum over the
replicas. The series of a lost replica keep their last values until Ray's agent drops them, even if
its replacement already has its own series.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import httpx
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

# A histogram. Replicas count its buckets, its sum and the number of requests in counters.
QUERY_SECONDS = "kway_query_seconds"
# The upper ends of the buckets.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, math.inf)
_PARTS = "bucket", "count", "sum"
_PREFIX = "ray_"
# Ray's label name -> kway's.
_EXPORTED_LABELS = {
    "outcome": "outcome",
    "status": "status",
    "protocol": "protocol",
    "source": "source",
    "le": "le",
    "loss": "loss",
    "model": "model",
    "version": "version",
    "replica": "replica",
    "NodeAddress": "node",
}


async def exposition(pages: Iterable[str]) -> bytes:
    """Return kway's own metrics from the agents' pages, in the Prometheus text format."""
    families: dict[str, Metric] = {}
    # Connect to nodes directly, ignoring proxies from the environment.
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        for page in pages:
            answer = await client.get(page)
            answer.raise_for_status()
            _collect(answer.text, families)
    return render(families)


def _collect(text: str, families: dict[str, Metric]) -> None:
    """Add kway's metric families from an agent's page, without Ray's prefix and labels."""
    ours = "\n".join(
        line
        for line in text.splitlines()
        if line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith(f"{_PREFIX}kway_")
    )
    for family in text_string_to_metric_families(ours + "\n"):
        name = family.name.removeprefix(_PREFIX)
        exported = families.setdefault(name, Metric(name, family.documentation, family.type))
        for sample in family.samples:
            labels = {
                ours: sample.labels[theirs]
                for theirs, ours in _EXPORTED_LABELS.items()
                if theirs in sample.labels
            }
            exported.add_sample(sample.name.removeprefix(_PREFIX), labels, sample.value)


def render(families: dict[str, Metric]) -> bytes:
    """Render `families` as Prometheus text, with the histogram of the request times instead of its
    counters."""
    parts = {end: families.pop(f"{QUERY_SECONDS}_{end}", None) for end in _PARTS}
    histogram = Metric(
        QUERY_SECONDS,
        "Time in seconds from the headers of a request to its response, also of rejected requests.",
        "histogram",
    )
    for end, family in parts.items():
        found = [] if family is None else [(one.labels, one.value) for one in family.samples]
        for labels, value in _all_buckets(found) if end == "bucket" else found:
            histogram.add_sample(f"{QUERY_SECONDS}_{end}", labels, value)
    if histogram.samples:
        families = {**families, QUERY_SECONDS: histogram}
    return b"".join(generate_latest(_One(families[name])) for name in sorted(families))


def _all_buckets(
    found: Iterable[tuple[dict[str, str], float]],
) -> Iterator[tuple[dict[str, str], float]]:
    """Add the empty buckets, which have not been counted."""
    of_replicas: dict[frozenset[tuple[str, str]], dict[str, float]] = defaultdict(dict)
    for labels, value in found:
        others = frozenset((name, one) for name, one in labels.items() if name != "le")
        of_replicas[others][labels["le"]] = value
    for others, counts in of_replicas.items():
        for end in map(floatToGoString, BUCKETS):
            yield {**dict(others), "le": end}, counts.get(end, 0)


class _One:
    """A registry that contains one metric family, with the interface that generate_latest
    expects."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]
