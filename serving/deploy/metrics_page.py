"""The page at /metrics: the counts of the whole server, fetched from Ray's agents on its nodes.

Whichever replica is asked, the numbers are those of all. They lag by Ray's report interval
(`serving/deploy/server.py` sets 1 s). Each replica has its own series: sum over them. Those of a
lost one stay as they were beside its successor's, until Ray's agent drops them.
"""

from collections.abc import Iterable

import httpx
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

EXACT_SECONDS = "kway_query_exact_seconds"
_PREFIX = "ray_"
# Ray's name of a label -> ours.
_KEPT_LABELS = {
    "outcome": "outcome",
    "status": "status",
    "le": "le",
    "loss": "loss",
    "replica": "replica",
    "NodeAddress": "node",
}


async def exposition(pages: Iterable[str]) -> bytes:
    """kway's own metrics from the agents' pages, in Prometheus text form."""
    families: dict[str, Metric] = {}
    # Nodes are reached directly: a proxy from the environment has no business here.
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        for page in pages:
            answer = await client.get(page)
            answer.raise_for_status()
            _collect(answer.text, families)
    return render(families)


def _collect(text: str, families: dict[str, Metric]) -> None:
    """Add the families of an agent's page whose names are ours, without Ray's prefix and labels."""
    ours = "\n".join(
        line
        for line in text.splitlines()
        if line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith(f"{_PREFIX}kway_")
    )
    for family in text_string_to_metric_families(ours + "\n"):
        name = family.name.removeprefix(_PREFIX)
        kept = families.setdefault(name, Metric(name, family.documentation, family.type))
        for sample in family.samples:
            labels = {
                ours: sample.labels[theirs]
                for theirs, ours in _KEPT_LABELS.items()
                if theirs in sample.labels
            }
            kept.add_sample(sample.name.removeprefix(_PREFIX), labels, sample.value)


def render(families: dict[str, Metric]) -> bytes:
    """Prometheus text of `families`, with the sums of seconds that Ray made up put right.

    Ray rebuilds a histogram from the middles of its buckets; the true sum is counted beside it.
    """
    exact = families.pop(EXACT_SECONDS, None)
    histogram = families.get("kway_query_seconds")
    if histogram is not None:
        histogram.samples = [s for s in histogram.samples if not s.name.endswith("_sum")]
        for sample in exact.samples if exact is not None else ():
            histogram.add_sample("kway_query_seconds_sum", sample.labels, sample.value)
    return b"".join(generate_latest(_One(families[name])) for name in sorted(families))


class _One:
    """A registry of one family, as generate_latest wants it."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]
