"""The page at /metrics: metrics of the entire server, fetched from Ray's agents on its nodes.

Every replica returns the metrics of all replicas. They lag by Ray's report interval
(`serving/deploy/private_ray.py` sets 1 s). Each replica has its own series, so sum over the
replicas. The series of a lost replica keep their last values until Ray's agent drops them, even if
its replacement already has its own series.
"""

from collections.abc import Iterable

import httpx
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

EXACT_SECONDS = "kway_query_exact_seconds"
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
    "result": "result",
    "stage": "stage",
    "batch_size": "batch_size",
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
    """Render `families` as Prometheus text, with the exact sum of the request times instead of
    Ray's estimate.

    Ray estimates the sum of a histogram from the midpoints of its buckets. A separate counter
    contains the exact sum.
    """
    exact = families.pop(EXACT_SECONDS, None)
    histogram = families.get("kway_query_seconds")
    if histogram is not None:
        histogram.samples = [s for s in histogram.samples if not s.name.endswith("_sum")]
        for sample in exact.samples if exact is not None else ():
            histogram.add_sample("kway_query_seconds_sum", sample.labels, sample.value)
    return b"".join(generate_latest(_One(families[name])) for name in sorted(families))


class _One:
    """A registry that contains one metric family, with the interface that generate_latest
    expects."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]
