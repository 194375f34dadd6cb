"""Statistics of the model: what the batches count, and what the metrics page returns."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from serving.batching import Batcher
from serving.inference.statistics import ModelStatistics as Found
from serving.inference.statistics import statistics_of
from serving.statistics import STAGES, BatchTimes, ModelStatistics


def page(*replicas: ModelStatistics, model: str = "pets") -> bytes:
    """Return the metrics page of these replicas, with integers as floats, as Ray writes them."""
    lines = []
    for number, statistics in enumerate(replicas):
        for name, labels, value in statistics.series():
            shown = {"replica": str(number), "node": "127.0.0.1", "model": model, **labels}
            text = ",".join(f'{key}="{one}"' for key, one in shown.items())
            lines.append(f"{name}{{{text}}} {float(value)!r}\n")
    return "".join(lines).encode()


def found_of(*replicas: ModelStatistics) -> Found:
    (found,) = statistics_of(page(*replicas) + page(*replicas, model="other"), ["pets"])
    return found


def test_the_statistics_of_all_replicas_and_of_one_model_are_added() -> None:
    one, other = ModelStatistics(), ModelStatistics()
    one.add_batch(2, BatchTimes(10, 20, 30))
    one.add_success(inputs=2, ns=100, times=BatchTimes(10, 20, 30))
    other.add_batch(2, BatchTimes(1, 2, 3))
    other.add_batch(5, BatchTimes(4, 5, 6))
    other.add_success(inputs=7, ns=1000, times=BatchTimes(5, 7, 9))
    other.add_failure(50)
    found = found_of(one, other)
    durations = {name: (one.count, one.ns) for name, one in found.inference_stats}
    assert durations == {
        "success": (2, 1100),
        "fail": (1, 50),
        "queue": (2, 40 + 979),
        "compute_input": (2, 15),
        "compute_infer": (2, 27),
        "compute_output": (2, 39),
        "cache_hit": (0, 0),
        "cache_miss": (0, 0),
    }
    assert (found.inference_count, found.execution_count) == (9, 3)
    assert [
        (one.batch_size, one.compute_input.count, one.compute_input.ns) for one in found.batch_stats
    ] == [(2, 2, 11), (5, 1, 4)]


def test_the_page_is_parsed_once_for_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []

    def parse(text: str) -> Iterator[Metric]:
        parsed.append(text)
        return text_string_to_metric_families(text)

    monkeypatch.setattr("serving.inference.statistics.text_string_to_metric_families", parse)
    one, other = ModelStatistics(), ModelStatistics()
    one.add_success(inputs=2, ns=100, times=BatchTimes(10, 20, 30))
    other.add_success(inputs=5, ns=100, times=BatchTimes(10, 20, 30))
    found = statistics_of(page(one) + page(other, model="dogs"), ["dogs", "unknown", "pets"])
    counts = [(one.name, one.inference_count) for one in found]
    assert counts == [("dogs", 5), ("unknown", 0), ("pets", 2)]
    assert len(parsed) == 1


def run(scenario: Any, **options: Any) -> Found:
    """Run `scenario` with a batcher and return the statistics."""
    statistics = ModelStatistics()

    def forward(batch: Sequence[float]) -> torch.Tensor:
        if -1 in batch:
            raise RuntimeError("the model failed")
        return torch.tensor(batch)

    async def main() -> None:
        limits = {"batch_size": 4, "wait_seconds": 0.0, "max_queued": 10, **options}
        await scenario(Batcher(forward, statistics=statistics, **limits))

    asyncio.run(main())
    return found_of(statistics)


def inputs(*values: float) -> list[Any]:
    return [lambda value=value: value for value in values]


def assert_consistent(found: Found) -> None:
    stats = found.inference_stats
    parts = [getattr(stats, stage) for stage in STAGES]
    assert {one.count for one in parts} == {stats.success.count}
    assert sum(one.ns for one in parts) == pytest.approx(stats.success.ns, abs=10)
    assert all(one.ns > 0 for one in parts)


def test_requests_that_share_a_batch_and_a_request_of_several_batches_are_counted() -> None:
    async def scenario(batcher: Batcher) -> None:
        shared = [batcher.submit(inputs(one), torch.Tensor.sum) for one in (1.0, 2.0, 3.0)]
        assert await asyncio.gather(*shared) == [1, 2, 3]
        assert await batcher.submit(inputs(*range(10)), torch.Tensor.sum) == 45

    found = run(scenario)
    assert_consistent(found)
    assert found.inference_stats.success.count == 4
    assert found.inference_count == 13
    sizes = [(one.batch_size, one.compute_infer.count) for one in found.batch_stats]
    assert sum(size * count for size, count in sizes) == 13
    assert found.execution_count == sum(count for _, count in sizes) == 4


def test_requests_fail_in_decoding_and_in_the_model() -> None:
    def undecodable() -> None:
        raise ValueError("no image")

    async def scenario(batcher: Batcher) -> None:
        with pytest.raises(ValueError, match="no image"):
            await batcher.submit([*inputs(1.0), undecodable], torch.Tensor.sum)
        with pytest.raises(RuntimeError, match="the model failed"):
            await batcher.submit(inputs(-1.0), torch.Tensor.sum)
        assert await batcher.submit(inputs(1.0), torch.Tensor.sum) == 1

    found = run(scenario)
    assert_consistent(found)
    assert (found.inference_stats.fail.count, found.inference_stats.success.count) == (2, 1)
    assert (found.inference_count, found.execution_count) == (1, 1)
