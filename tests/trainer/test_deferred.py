"""Steps whose outcome is decided on the device produce the same results as synchronous steps.

On a CPU, `train.synchronous: false` runs the code for GPUs.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import trainer.train
from tests.ranks import run_on_ranks
from tests.shards import glyph_recipe
from tests.system.processes import write_recipe
from tests.system.runs import losses
from tests.trainer.training import full_entries, share, started
from trainer.__main__ import main
from trainer.backbone.batch_norm import BufferCopies
from trainer.steps.deferred import Numbers
from trainer.steps.loss_scale import LossScale
from trainer.steps.take import read_numbers, take_step
from trainer.task import Task

Results = tuple[list[Numbers], dict[str, np.ndarray]]


def take(task: Task, step: int, rows: int = 12) -> Numbers:
    return read_numbers(task, take_step(task, share(task, rows), 1.0, step=step))


def take_broken(task: Task, step: int) -> Numbers:
    """Take a step in which the features of the last rank are NaN."""
    if task.world.rank == task.world.size - 1:
        task.backbone.std.zero_()
    taken = take_step(task, share(task), 1.0, step=step)
    task.backbone.std.fill_(0.25)
    return read_numbers(task, taken)


def entries(task: Task) -> dict[str, np.ndarray]:
    """Return everything that a step changes."""
    found = full_entries(task)
    found |= {f"buffer {name}": b.numpy().copy() for name, b in task.backbone.named_buffers()}
    if task.average is not None:
        found |= {f"average {name}": a.numpy().copy() for name, a in task.average.averages.items()}
    return found


def trained(shards: Path, changes: dict[str, Any], *, synchronous: bool) -> Results:
    task = started(shards, **changes, train__synchronous=synchronous)
    assert task.defers is not synchronous
    numbers = [take(task, step, rows) for step, rows in ((1, 12), (2, 12), (3, task.global_batch))]
    results = numbers, entries(task)
    task.strategy.close()
    return results


def both(shards: Path, cases: list[dict[str, Any]]) -> list[tuple[Results, Results]]:
    return [
        (trained(shards, case, synchronous=False), trained(shards, case, synchronous=True))
        for case in cases
    ]


DDP, FSDP = ({"train__strategy": {"kind": kind}} for kind in ("ddp", "fsdp"))
CASES: list[dict[str, Any]] = [
    {**DDP, "train__clip_norm": 0.1},
    {**FSDP, "train__clip_norm": 1e6, "optimizer": {"kind": "adamw"}},
    {**DDP, "optimizer": {"kind": "lamb"}, "train__ema": {"decay": 0.5}},
    {**FSDP, "optimizer": {"kind": "lamb"}, "train__micro_batches": 2},
    {**FSDP, "train__micro_batches": 3, "head__loss__kind": "batch_ce"},
    {**DDP, "train__micro_batches": 2, "head__class_weights": "balanced"},
    {**DDP, "train__micro_batches": 2, "head__logits": {"kind": "arcface", "scale": 8}},
    {**DDP, "train__precision": "fp16"},
    {"train__strategy": {"kind": "fsdp", "shard_group": 1}, "train__micro_batches": 2},
    {"train__strategy": {"kind": "fsdp", "param_dtype": "bf16"}, "train__precision": "bf16"},
]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_deferred_steps_produce_the_same_results_as_synchronous_ones(
    num_ranks: int, glyphs: Path
) -> None:
    cases = [{**case, "train__global_batch": 12} for case in CASES]
    for rank in run_on_ranks(num_ranks, both, glyphs, cases):
        for case, (deferred, synchronous) in zip(cases, rank, strict=True):
            for ours, theirs in zip(deferred[0], synchronous[0], strict=True):
                assert ours.loss == pytest.approx(theirs.loss, rel=1e-4), case
                assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-3), case
                assert ours.skipped is theirs.skipped is False, case
            assert deferred[1].keys() == synchronous[1].keys()
            for name, value in synchronous[1].items():
                np.testing.assert_allclose(
                    deferred[1][name], value, rtol=2e-3, atol=2e-5, err_msg=f"{case} {name}"
                )


def skipped(shards: Path, cases: list[dict[str, Any]]) -> list[tuple[list[str], str, float]]:
    """Take a step, a broken step and another step; return the names of the entries that the broken
    step changed, its reason, and the loss of the last step."""
    found = []
    for case in cases:
        task = started(shards, **case, train__synchronous=False)
        take(task, 1)
        before = entries(task)
        numbers = take_broken(task, 2)
        assert numbers.skipped
        after = entries(task)
        changed = [name for name, value in before.items() if not np.array_equal(value, after[name])]
        found.append((changed, numbers.reason, take(task, 3).loss))
        task.strategy.close()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_skipped_step_changes_nothing_and_its_reason_names_the_rank(
    num_ranks: int, glyphs: Path
) -> None:
    cases = [{**case, "train__ema": {"decay": 0.5}, "train__global_batch": 12} for case in CASES]
    for rank in run_on_ranks(num_ranks, skipped, glyphs, cases):
        for case, (changed, reason, loss) in zip(cases, rank, strict=True):
            assert changed == [], case
            parts = case.get("train__micro_batches", 1)
            is_whole = parts == 1 or case.get("head__loss__kind") == "batch_ce"
            prefix = "" if is_whole else f"micro-batch 1 of {parts}: "
            # With synchronized batch norm, the features of all ranks become NaN.
            assert reason.startswith(f"{prefix}the loss is NaN; on rank "), case
            assert f"on rank {num_ranks - 1}, " in reason, case
            assert "rows of features (rows" in reason, case
            assert math.isfinite(loss), case


def test_a_first_step_that_is_skipped_leaves_fresh_moments(glyphs: Path) -> None:
    for kind in ("sgd", "adamw", "lamb"):
        task, other = (
            started(glyphs, optimizer={"kind": kind}, train__synchronous=False) for _ in range(2)
        )
        assert take_broken(task, 1).skipped
        found, expected = take(task, 2), take(other, 2)
        assert found == expected, kind
        after = entries(other)
        assert all(np.array_equal(value, after[name]) for name, value in entries(task).items())


def test_an_overflow_lowers_the_scale_of_the_next_step_on_the_device(glyphs: Path) -> None:
    task = started(glyphs, train__precision="fp16", train__synchronous=False)
    take(task, 1)
    task.loss_scale.restore({"value": 2.0**24, "good_steps": 0})
    before = entries(task)
    numbers = take(task, 2)
    assert numbers.skipped
    assert math.isfinite(numbers.loss)
    assert float(task.loss_scale.on_device(task.world.device)) == 2.0**23
    assert all(np.array_equal(value, before[name]) for name, value in entries(task).items())


def test_the_scale_on_the_device_follows_the_scale_of_the_host() -> None:
    host, device = LossScale.for_precision("fp16"), LossScale.for_precision("fp16")
    host.good_steps = device.good_steps = 1990
    cpu, loss = torch.device("cpu"), torch.tensor(1.0)
    outcomes = [*["ok"] * 12, "overflow", "nan", *["ok"] * 3, *["overflow"] * 40, "ok"]
    for outcome in outcomes:
        assert float(device.on_device(cpu)) == host.value
        if outcome == "ok":
            host.succeeded()
        elif outcome == "overflow":
            host.overflowed()
        factor = math.nan if outcome == "nan" else 1.0
        device.update_on_device(loss * factor, torch.tensor(outcome != "ok"))
    assert host.value == 2.0**-14


def test_buffers_are_restored_only_where_the_step_was_skipped() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(2))
    buffers = list(model.buffers())
    before = [buffer.clone() for buffer in buffers]
    copies = BufferCopies(model)
    for buffer in buffers:
        buffer += 1
    copies.restore_where(torch.tensor(False))
    assert all(torch.equal(b, old + 1) for b, old in zip(buffers, before, strict=True))
    copies.restore_where(torch.tensor(True))
    assert all(torch.equal(b, old) for b, old in zip(buffers, before, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_deferred_step_reads_nothing_from_the_device(case: dict[str, Any], glyphs: Path) -> None:
    task = started(glyphs, **case, train__synchronous=False)
    take(task, 1)  # creates the moments
    with FakeTensorMode(allow_non_fake_inputs=True):
        take_step(task, share(task), 1.0, step=2)


def test_a_synchronous_step_reads_the_loss(glyphs: Path) -> None:
    """If this did not raise, the test above could never fail."""
    task = started(glyphs, train__synchronous=True)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(DataDependentOutputException),
    ):
        take_step(task, share(task), 1.0, step=1)


def break_steps(monkeypatch: pytest.MonkeyPatch, *broken: int) -> None:
    """Make the features of these steps NaN."""

    def broken_take(task: Task, batch: Any, factor: float, *, step: int) -> Any:
        if step in broken:
            task.backbone.std.zero_()
        taken = take_step(task, batch, factor, step=step)
        task.backbone.std.fill_(0.25)
        return taken

    monkeypatch.setattr(trainer.train, "take_step", broken_take)


def records(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run, except those of checkpoints, which are written in the
    background."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["event"] != "checkpoint"]
    names = ("event", "step", "loss", "gradient_norm", "skipped_steps", "top1")
    return [{name: line[name] for name in names if name in line} for line in lines]


def assert_same_records(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [line["event"] for line in found] == [line["event"] for line in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"event"}:
            expected_value = theirs[name] and pytest.approx(theirs[name], rel=1e-3)
            assert ours[name] == expected_value, (name, ours, theirs)


def test_a_run_logs_saves_and_skips_the_same_steps(glyphs, tmp_path, monkeypatch):
    break_steps(monkeypatch, 2, 6)
    found = {}
    for synchronous in (True, False):
        run = tmp_path / str(synchronous)
        recipe = glyph_recipe(
            glyphs,
            run,
            train__duration={"steps": 8},
            train__max_skipped_steps=2,
            train__synchronous=synchronous,
            evaluation__every={"steps": 3},
            checkpoint={"every": {"steps": 4}},
            telemetry={"log_every": 1},
        )
        assert main([str(write_recipe(tmp_path, recipe))]) == 0
        found[synchronous] = records(run)
        saved = {path.name for path in (run / "checkpoints").iterdir()}
        assert {"step-00000004", "step-00000008"} <= saved
        lines = (run / "nonfinite-rank0.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [2, 6]
    assert_same_records(found[False], found[True])


def deferred_recipe(shards: Path, folder: Path, **changes: Any) -> str:
    """Return the path of a recipe for a run of eight deferred steps in `folder/run`."""
    recipe = glyph_recipe(
        shards,
        folder / "run",
        train__duration={"steps": 8},
        train__synchronous=False,
        telemetry={"log_every": 1},
        **changes,
    )
    return str(write_recipe(folder, recipe))


def test_too_many_skipped_steps_stop_a_run_before_the_next_checkpoint(
    glyphs, tmp_path, monkeypatch, capsys
):
    break_steps(monkeypatch, 3)
    run = tmp_path / "run"
    recipe = deferred_recipe(glyphs, tmp_path, checkpoint={"every": {"steps": 4}})
    assert main([recipe]) == 1
    error = capsys.readouterr().err
    assert "step 3: the loss is NaN; on rank 0" in error
    assert sorted(losses(run)) == [1, 2]
    assert not (run / "checkpoints").exists()


def test_an_error_between_steps_does_not_lose_the_outstanding_step(
    glyphs, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    recipe = deferred_recipe(glyphs, tmp_path, train__max_skipped_steps=1)
    break_steps(monkeypatch, 3)
    original = trainer.train.agree

    def agree(*args: Any, **options: Any) -> Any:
        if (run / "metrics.jsonl").exists() and losses(run).keys() >= {1, 2}:
            raise OSError("the disk failed")
        return original(*args, **options)

    monkeypatch.setattr(trainer.train, "agree", agree)
    assert main([recipe]) == 2
    assert "the disk failed" in capsys.readouterr().err
    assert sorted(losses(run)) == [1, 2, 3]
    (skipped_step,) = (run / "nonfinite-rank0.jsonl").read_text().splitlines()
    assert json.loads(skipped_step)["step"] == 3


def test_the_first_batch_of_a_deferred_run_is_checked(glyphs: Path) -> None:
    task = started(glyphs, train__synchronous=False)
    batch = share(task)
    batch.labels[2] = 13
    with pytest.raises(ValueError, match=r"labels are outside 0\.\.12"):
        take_step(task, batch, 1.0, step=1)


@pytest.mark.parametrize("loss", ["spherical_softmax", "taylor_softmax"])
def test_a_factored_head_cannot_defer(loss: str, glyphs: Path) -> None:
    changes = {"head__weights": {"kind": "factored"}, "head__loss__kind": loss}
    assert not started(glyphs, **changes).defers
    with pytest.raises(ValueError, match=r"train.synchronous is false, but .* is factored"):
        started(glyphs, **changes, train__synchronous=False)
