"""Components of a replica without a server: answers, batches, metrics and the port check."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString
from torch import Tensor

from serving.answer import make_query
from serving.api_error import ApiError
from serving.batching import Batcher
from serving.metrics import BUCKETS, Metrics, Prometheus
from serving.model import Model
from tests.noise_images import image
from tests.tiny_bundle import write
from trainer.bundle.spec import LossSpec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.open(write(tmp_path_factory.mktemp("bundles") / "pets"))


def test_a_recall_selects_the_thresholds_stored_in_the_bundle(model: Model) -> None:
    query = make_query(model.bundle, ["malamute", "7"], recall=0.9)
    own, pooled = model.answer([model.prepare(image(0, 9, 9))], query).results[0].verdicts
    assert (own.threshold, own.threshold_source, own.match) == (1.0, "guaranteed", own.score >= 1.0)
    assert (pooled.threshold, pooled.threshold_source) == (0.5, "pooled")


def test_a_score_that_equals_the_threshold_is_a_match(model: Model) -> None:
    prepared = [model.prepare(image(0, 9, 9))]
    score = model.answer(prepared, make_query(model.bundle, [0])).results[0].verdicts[0].score
    answer = model.answer(prepared, make_query(model.bundle, [0], threshold=score))
    assert answer.results[0].verdicts[0].match


def test_every_answer_from_an_unaligned_model_has_a_notice(tmp_path: Path, model: Model) -> None:
    assert (
        model.answer([model.prepare(image(0, 9, 9))], make_query(model.bundle, [0])).notice is None
    )
    write(tmp_path / "b", changes={"loss": {"kind": "ce", "aligned": False}})
    other = Model.open(tmp_path / "b")
    found = other.answer([other.prepare(image(0, 9, 9))], make_query(other.bundle, [0]))
    assert not found.aligned
    assert "trained with ce" in str(found.notice)


# ---------------------------------------------------------------------------- batches


async def submit(batcher: Batcher, inputs: list[Tensor]) -> Tensor:
    return await batcher.submit([lambda one=one: one for one in inputs], lambda rows: rows)


def test_requests_that_arrive_during_a_forward_pass_share_the_next_batch() -> None:
    sizes: list[int] = []
    gate = threading.Event()

    def forward(inputs: list[Tensor]) -> Tensor:
        sizes.append(len(inputs))
        assert gate.wait(60)
        return torch.stack(list(inputs)) * 2

    async def scenario() -> list[Tensor]:
        batcher = Batcher(forward, batch_size=4, wait_seconds=0, max_queued=100)
        tasks = [asyncio.create_task(submit(batcher, [torch.tensor([0.0])]))]
        await asyncio.sleep(0.05)  # the first one is in the forward pass now
        tasks += [
            asyncio.create_task(
                submit(batcher, [torch.tensor([float(n)]), torch.tensor([n + 0.5])])
            )
            for n in range(1, 5)
        ]
        await asyncio.sleep(0.05)
        assert batcher.seconds_in_forward() > 0
        gate.set()
        return await asyncio.gather(*tasks)

    results = asyncio.run(scenario())
    assert sizes == [1, 4, 4]
    assert results[0].tolist() == [[0.0]]
    assert [r.tolist() for r in results[1:]] == [[[2.0 * n], [2.0 * n + 1]] for n in range(1, 5)]


def test_a_full_queue_rejects_new_inputs_and_serves_the_queued_ones() -> None:
    gate = threading.Event()

    def forward(inputs: list[Tensor]) -> Tensor:
        gate.wait(60)
        return torch.stack(list(inputs))

    async def scenario() -> None:
        batcher = Batcher(forward, batch_size=1, wait_seconds=0, max_queued=2)
        working = asyncio.create_task(submit(batcher, [torch.zeros(1)]))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(submit(batcher, [torch.ones(1)] * 2))
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="waiting for the model"):
            await submit(batcher, [torch.zeros(1)])
        gate.set()
        assert (await working).tolist() == [[0.0]]
        assert (await waiting).tolist() == [[1.0], [1.0]]

    asyncio.run(scenario())


def test_no_forward_pass_is_run_for_a_disconnected_client() -> None:
    seen: list[float] = []
    gate = threading.Event()

    def forward(inputs: list[Tensor]) -> Tensor:
        gate.wait(60)
        seen.extend(float(one) for one in inputs)
        return torch.stack(list(inputs))

    async def scenario() -> None:
        batcher = Batcher(forward, batch_size=1, wait_seconds=0, max_queued=9)
        first = asyncio.create_task(submit(batcher, [torch.tensor(0.0)]))
        await asyncio.sleep(0.05)
        disconnected = asyncio.create_task(submit(batcher, [torch.tensor(1.0)]))
        connected = asyncio.create_task(submit(batcher, [torch.tensor(2.0)]))
        await asyncio.sleep(0.05)
        disconnected.cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, connected)

    asyncio.run(scenario())
    assert seen == [0.0, 2.0]


@pytest.mark.parametrize("helpers", [None, ThreadPoolExecutor(2)])
@pytest.mark.parametrize("what", ["an input", "a result"])
def test_an_exception_fails_only_its_request(helpers: ThreadPoolExecutor | None, what: str) -> None:
    def fail(*_: object) -> Tensor:
        raise ValueError(f"{what} is invalid")

    def forward(inputs: list[Tensor]) -> Tensor:
        time.sleep(0.05)
        return torch.stack(list(inputs))

    async def scenario() -> None:
        batcher = Batcher(forward, batch_size=9, wait_seconds=0, max_queued=9, helpers=helpers)
        first = asyncio.create_task(submit(batcher, [torch.tensor(0.0)]))
        await asyncio.sleep(0.02)  # the others arrive during its forward pass
        bad = fail if what == "an input" else torch.tensor(2.0).clone
        inputs = [torch.tensor(1.0).clone, bad]
        complete = fail if what == "a result" else lambda rows: rows
        failing = asyncio.create_task(batcher.submit(inputs, complete))
        good = asyncio.create_task(submit(batcher, [torch.tensor(3.0)]))
        with pytest.raises(ValueError, match=f"{what} is invalid"):
            await failing
        assert (await first).tolist() == [0.0]
        assert (await good).tolist() == [3.0]

    asyncio.run(scenario())


def test_a_failed_forward_pass_fails_only_its_batch_and_long_requests_need_several() -> None:
    def forward(inputs: list[Tensor]) -> Tensor:
        assert len(inputs) <= 2
        if any(bool(one < 0) for one in inputs):
            raise RuntimeError("forward failed")
        return torch.stack(list(inputs))

    async def scenario() -> None:
        batcher = Batcher(forward, batch_size=2, wait_seconds=0, max_queued=9)
        with pytest.raises(RuntimeError, match="forward failed"):
            await submit(batcher, [torch.tensor(-1.0)])
        found = await submit(batcher, [torch.tensor(float(n)) for n in range(5)])
        assert found.tolist() == [0, 1, 2, 3, 4]

    asyncio.run(scenario())


# ---------------------------------------------------------------------------- metrics and ports


def test_the_metrics_page_has_every_metric_with_any_label() -> None:
    name = "a\u2028b\u0085c\x1cd\r\ne"  # line separators
    exporter = Prometheus()
    metrics = Metrics(exporter)
    loss = LossSpec(kind="ce", aligned=False)
    for version, is_rejected in (("v1", False), ("v2", True)):
        bundle: Any = SimpleNamespace(version=version, spec=SimpleNamespace(loss=loss))
        metrics.report(name, bundle, is_rejected=is_rejected, requests=3, queued_inputs=7)
    metrics.count(outcome="ok", inputs=2, seconds=0.2)
    metrics.count(outcome="timeout", inputs=0, seconds=31.0)
    metrics.count_reload(name, "failed")
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(exporter.page().decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    expected = {
        ("kway_query_requests_total", "ok"): 1,
        ("kway_query_requests_total", "timeout"): 1,
        ("kway_query_inputs_total",): 2,
        ("kway_query_seconds_count",): 2,
        ("kway_query_seconds_sum",): 31.2,
        ("kway_query_seconds_bucket", "+Inf"): 2,
        ("kway_reloads_total", name, "failed"): 1,
        ("kway_model_aligned", name, "ce"): 0,
        ("kway_model_version", name, "v1"): 0,
        ("kway_model_version", name, "v2"): 1,
        ("kway_model_rejected", name): 1,
        ("kway_requests_in_progress",): 3,
        ("kway_queued_inputs",): 7,
    } | {
        ("kway_query_seconds_bucket", floatToGoString(end)): 1 + (end > 31) - (end < 0.2)
        for end in BUCKETS
    }
    assert found == expected
