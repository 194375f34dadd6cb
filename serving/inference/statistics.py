"""The statistics extension of the protocol: counts and durations of all replicas, read from the
page at /metrics.

Fields have the names of Triton's `ModelStatistics` message.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from pydantic import BaseModel, Field

from serving import statistics as series


class Duration(BaseModel):
    """A number of requests or batches and their total time in nanoseconds."""

    count: int = 0
    ns: int = 0


class InferStatistics(BaseModel):
    """Durations of requests. `success` is the sum of `queue` and the `compute` stages."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration = Field(description="decoding of the inputs")
    compute_infer: Duration = Field(description="forward passes of the backbone")
    compute_output: Duration = Field(description="computation of the answers")
    cache_hit: Duration = Field(Duration(), description="always 0: there is no cache")
    cache_miss: Duration = Field(Duration(), description="always 0: there is no cache")


class BatchStatistics(BaseModel):
    """Durations of the forward passes with `batch_size` inputs."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class ModelStatistics(BaseModel):
    """Statistics of one model."""

    name: str
    version: str = ""
    last_inference: int = Field(description="time of the last request, in ms since the epoch")
    inference_count: int = Field(description="number of inputs of successful requests")
    execution_count: int = Field(description="number of forward passes")
    inference_stats: InferStatistics
    batch_stats: list[BatchStatistics]


class StatisticsResponse(BaseModel):
    model_stats: list[ModelStatistics]


def statistics_of(page: bytes, models: Sequence[str]) -> list[ModelStatistics]:
    """Return the statistics of each of `models` from a page of Prometheus metrics."""
    values = {model: _Values() for model in models}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            of_model = values.get(sample.labels.get("model", ""))
            if of_model is not None and sample.name in series.SERIES:
                of_model.add(sample)
    return [_statistics_of(model, values[model]) for model in models]


def _statistics_of(model: str, values: "_Values") -> ModelStatistics:
    succeeded = values.count(series.REQUESTS, result="success")
    counts = dict.fromkeys(series.STAGES, succeeded) | {
        result: values.count(series.REQUESTS, result=result) for result in series.RESULTS
    }
    batches = list(_batches(values))
    return ModelStatistics(
        name=model,
        last_inference=round(1e3 * values.last(series.LAST_SECONDS)),
        inference_count=values.count(series.INPUTS),
        execution_count=sum(one.compute_infer.count for one in batches),
        inference_stats=InferStatistics(
            **{
                stage: Duration(count=count, ns=values.ns(series.SECONDS, stage=stage))
                for stage, count in counts.items()
            }
        ),
        batch_stats=batches,
    )


def _batches(values: "_Values") -> Iterator[BatchStatistics]:
    for size in sorted(values.of_label(series.BATCHES, "batch_size"), key=int):
        count = values.count(series.BATCHES, batch_size=size)
        durations = {
            stage: Duration(
                count=count, ns=values.ns(series.BATCH_SECONDS, batch_size=size, stage=stage)
            )
            for stage in series.BatchTimes._fields
        }
        yield BatchStatistics(batch_size=int(size), **durations)


class _Values:
    """The samples of one model on a page, with one value per replica."""

    def __init__(self) -> None:
        self._samples: defaultdict[tuple[str, frozenset[tuple[str, str]]], list[float]]
        self._samples = defaultdict(list)

    def add(self, sample: Sample) -> None:
        names, _ = series.SERIES[sample.name]
        labels = frozenset((name, sample.labels[name]) for name in names)
        self._samples[sample.name, labels].append(sample.value)

    def count(self, name: str, **labels: str) -> int:
        return round(sum(self._of(name, labels)))

    def ns(self, name: str, **labels: str) -> int:
        return round(1e9 * sum(self._of(name, labels)))

    def last(self, name: str) -> float:
        return max(self._of(name, {}), default=0.0)

    def of_label(self, name: str, label: str) -> set[str]:
        """Return all values of a label."""
        found = (dict(labels) for metric, labels in self._samples if metric == name)
        return {labels[label] for labels in found}

    def _of(self, name: str, labels: dict[str, str]) -> list[float]:
        return self._samples.get((name, frozenset(labels.items())), [])
