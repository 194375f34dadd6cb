"""Steps whose outcome is decided on the device produce the same results as synchronous steps, and
the host does not wait for them.

On a CPU, `train.synchronous: false` runs the code for GPUs.
"""

import math
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainer.train
from heads.engine.inputs import NOTHING_COUNTS
from serving.addresses import free_port
from tests.host_reads import host_reads
from tests.ranks import forked, run_on_ranks, running, set_rank
from tests.shards import glyph_recipe
from tests.system.processes import write_recipe
from tests.system.runs import losses, read_lines
from tests.trainer.training import each, full_entries, share, started, take
from trainer.__main__ import main
from trainer.agreement import Agreement
from trainer.step import Numbers, StepNumbers, read_numbers, take_step
from trainer.task import Task
from trainer.world import leave


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


def started_deferred(shards: Path, class_ranks: int | None = None, **changes: Any) -> Task:
    task = started(shards, class_ranks, train__synchronous=False, **changes)
    assert task.defers
    return task


DDP, FSDP = ({"train__strategy": {"kind": kind}} for kind in ("ddp", "fsdp"))
DEEPSPEED = [{"kind": "deepspeed", "stage": stage} for stage in (1, 2, 3)]
CASES: list[dict[str, Any]] = [
    {**DDP, "train__clip_norm": 0.1},
    {**FSDP, "train__clip_norm": 1e6, "optimizer": {"kind": "adamw"}},
    {**DDP, "optimizer": {"kind": "adamw"}, "train__ema": {"decay": 0.5}},
    {**FSDP, "optimizer": {"kind": "adamw"}, "train__micro_batches": 2},
    {**FSDP, "train__micro_batches": 3, "head__loss__kind": "batch_ce"},
    {**DDP, "train__micro_batches": 2, "head__class_weights": "balanced"},
    {**DDP, "train__micro_batches": 2, "head__logits": {"kind": "arcface", "scale": 8}},
    {**DDP, "train__precision": "fp16"},
    {"train__strategy": {"kind": "fsdp", "shard_group": 1}, "train__micro_batches": 2},
    {"train__strategy": {"kind": "fsdp", "param_dtype": "bf16"}, "train__precision": "bf16"},
    {**DDP, "backbone__batch_norm": "local"},
    {**FSDP, "train__precision": "bf16", "train__activation_checkpointing": True},
]
PARTS = {"train__micro_batches": 2}


@dataclass(frozen=True)
class Steps:
    """What a task did in three steps, a fourth step that is skipped, and a fifth step.

    `reads` are the reads from the device in the second step; the first one creates the moments.
    `changed` are the names of the entries that the skipped step changed.
    """

    numbers: list[Numbers]
    entries: dict[str, np.ndarray]
    reads: list[str]
    changed: list[str]
    reason: str
    last_loss: float


def taken(start: Any, shards: Path, case: dict[str, Any]) -> Steps:
    options = {"train__ema": {"decay": 0.5}, **case}
    task = start(shards, options.pop("class_ranks", None), **options)
    first, batch = take(task, 1), share(task)
    with host_reads(batch.tensors()) as reads:
        launched = take_step(task, batch, 1.0, step=2)
    numbers = [first, read_numbers(task, launched), take(task, 3)]
    before = entries(task)
    broken = take_broken(task, 4)
    assert broken.skipped
    after = entries(task)
    # The padding of DeepSpeed's pieces is uninitialized memory, which may be NaN.
    changed = [
        name
        for name, value in before.items()
        if not np.array_equal(value, after[name], equal_nan=True)
    ]
    sites = [line.rpartition(":")[0] for line in reads]  # without the line number
    found = Steps(numbers, before, sites, changed, broken.reason, take(task, 5).loss)
    task.strategy.close()
    return found


def taken_in_both_modes(shards: Path, cases: list[dict[str, Any]]) -> list[list[Steps]]:
    return [[taken(start, shards, case) for start in (started, started_deferred)] for case in cases]


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (2, CASES),
        (4, [{**DDP, "class_ranks": 2}, {**CASES[4], "class_ranks": 2}]),
    ],
    ids=["2", "4"],
)
def test_deferred_steps_give_the_same_results_without_reading_from_the_device(
    num_ranks: int, cases: list[dict[str, Any]], glyphs: Path
) -> None:
    """tests/heads/test_no_waiting.py covers each loss."""
    for rank in run_on_ranks(num_ranks, taken_in_both_modes, glyphs, cases):
        for case, (synchronous, deferred) in zip(cases, rank, strict=True):
            assert_same_results(deferred, synchronous, case)
            assert deferred.reads == [], case
            for steps in (synchronous, deferred):
                assert_nothing_changed(steps, case, num_ranks)


def assert_same_results(found: Steps, expected: Steps, case: dict[str, Any]) -> None:
    for ours, theirs in zip(found.numbers, expected.numbers, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4), case
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-3), case
        assert ours.skipped is theirs.skipped is False, case
    assert found.entries.keys() == expected.entries.keys()
    for name, value in expected.entries.items():
        np.testing.assert_allclose(
            found.entries[name], value, rtol=2e-3, atol=2e-5, err_msg=f"{case} {name}"
        )


def assert_nothing_changed(steps: Steps, case: dict[str, Any], num_ranks: int) -> None:
    """The skipped step changed nothing, and its reason names the rank."""
    assert steps.changed == [], case
    parts = case.get("train__micro_batches", 1)
    is_whole = parts == 1 or case.get("head__loss__kind") == "batch_ce"
    prefix = "" if is_whole else f"micro-batch 1 of {parts}: "
    # With synchronized batch norm, the features of all ranks become NaN.
    assert steps.reason.startswith(f"{prefix}the loss is NaN; on rank "), case
    assert f"on rank {num_ranks - 1}, " in steps.reason, case
    assert "rows of features (rows" in steps.reason, case
    assert math.isfinite(steps.last_loss), case


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (2, [{**CASES[0], "train__strategy": kind} for kind in DEEPSPEED]),
        # The weights cannot be divided evenly among three ranks, so the pieces are padded.
        (3, [{**PARTS, "train__strategy": DEEPSPEED[2]}]),
    ],
    ids=["2", "3"],
)
def test_a_step_reads_once_if_its_optimizer_does_not_read_the_flag(
    num_ranks: int, cases: list[dict[str, Any]], glyphs: Path
) -> None:
    """DeepSpeed itself reads more in its forward pass and its update."""
    for rank in run_on_ranks(num_ranks, each, taken, [(started, glyphs, case) for case in cases]):
        for case, steps in zip(cases, rank, strict=True):
            ours = [read for read in steps.reads if "trainer/strategies/deepspeed.py" not in read]
            assert ours == ["tolist at trainer/step.py"], case
            assert_nothing_changed(steps, case, num_ranks)


def test_a_first_step_that_is_skipped_leaves_fresh_moments(glyphs: Path) -> None:
    for kind in ("sgd", "adamw"):
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
    assert numbers.overflowed
    assert float(task.loss_scale.value) == 2.0**23
    assert all(np.array_equal(value, before[name]) for name, value in entries(task).items())


def break_steps(monkeypatch: pytest.MonkeyPatch, *broken: int) -> None:
    """Make the features of these steps NaN."""

    def broken_take(task: Task, batch: Any, factor: float, *, step: int, **options: Any) -> Any:
        if step in broken:
            task.backbone.std.zero_()
        taken = take_step(task, batch, factor, step=step, **options)
        task.backbone.std.fill_(0.25)
        return taken

    monkeypatch.setattr(trainer.train, "take_step", broken_take)


def records(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run, except those of checkpoints, which are written in the
    background."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if line["event"] != "checkpoint"]
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
        skipped = read_lines(run / "nonfinite-rank0.jsonl")
        assert [line["step"] for line in skipped] == [2, 6]
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
    original = Agreement.start

    def start(*args: Any, **options: Any) -> Any:
        if (run / "metrics.jsonl").exists() and losses(run).keys() >= {1, 2}:
            raise OSError("the disk failed")
        return original(*args, **options)

    monkeypatch.setattr(Agreement, "start", start)
    assert main([recipe]) == 2
    assert "the disk failed" in capsys.readouterr().err
    assert sorted(losses(run)) == [1, 2, 3]
    (skipped,) = read_lines(run / "nonfinite-rank0.jsonl")
    assert skipped["step"] == 3


class NeverReached:
    """The event of a step whose collectives never end on the device, because a rank is lost."""

    def query(self) -> bool:
        return False


def lose_rank_1(rank: int, port: int, recipe: str, output: Path) -> None:
    """Train on two ranks. At the end of step 3, rank 1 is killed, and from then on rank 0 waits for
    its device."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 2)
    set_rank(rank, 2, port)

    def take(task: Task, *args: Any, step: int, **options: Any) -> Any:
        if rank == 0 and step == 3:
            StepNumbers.event = NeverReached()
        taken = take_step(task, *args, step=step, **options)
        if rank == 1 and step == 3:
            time.sleep(0.5)  # the exchange of this step completes
            os.kill(os.getpid(), signal.SIGKILL)
        return taken

    trainer.train.take_step = take
    leave(main([recipe]))


def two_ranks(mode: str, shards: Path, folder: Path, port: int) -> list[BaseProcess]:
    """Return two ranks, not yet started, that run `lose_rank_1` with outputs in `folder`."""
    folder.mkdir()
    recipe = glyph_recipe(shards, folder / "run", train__synchronous=mode != "deferred")
    path = str(write_recipe(folder, recipe))
    return [forked(lose_rank_1, rank, port, path, folder / str(rank)) for rank in (0, 1)]


def test_a_rank_that_waits_for_its_device_exits_if_another_rank_is_lost(
    glyphs: Path, tmp_path: Path
) -> None:
    modes = ("synchronous", "deferred")
    # The runs wait for most of their time, so they run in parallel.
    pairs = {
        mode: two_ranks(mode, glyphs, tmp_path / mode, free_port("127.0.0.1", 0)) for mode in modes
    }
    ranks = [process for pair in pairs.values() for process in pair]
    with running(ranks):
        for process in ranks:
            process.join(60)
        for mode, pair in pairs.items():
            assert [process.exitcode for process in pair] == [1, -signal.SIGKILL], mode
            output = (tmp_path / mode / "0").read_text()
            assert output == "error: rank 0: another rank exited during a step\n", mode


def test_labels_of_the_first_batch_outside_the_classes_are_reported(glyphs: Path) -> None:
    task = started_deferred(glyphs)
    batch = share(task)
    batch.labels[2] = 13
    with pytest.raises(ValueError, match=r"^labels are outside 0\.\.12"):
        take_step(task, batch, 1.0, step=1)
    take(task, 1)


def without_counting_rows(shards: Path, case: dict[str, Any]) -> tuple[str, bool]:
    """Take a step in which no row has a positive weight. Return the error and whether the weights
    are unchanged."""
    task = started_deferred(shards, **case)
    take(task, 1)
    before = entries(task)
    task.head.engine.class_weights.zero_()
    taken = take_step(task, share(task), 1.0, step=2)
    with pytest.raises(ValueError, match="step 2") as error:
        read_numbers(task, taken)
    after = entries(task)
    task.strategy.close()
    same = all(np.array_equal(value, after[name]) for name, value in before.items())
    return str(error.value), same


def test_a_batch_without_positive_row_weights_is_reported_one_step_late(glyphs: Path) -> None:
    weighted = {"train__global_batch": 12, "head__class_weights": "balanced"}
    cases = [weighted, {**weighted, **PARTS}, {**weighted, **PARTS, "head__loss__kind": "batch_ce"}]
    for rank in run_on_ranks(2, each, without_counting_rows, [(glyphs, case) for case in cases]):
        assert rank == [(f"step 2: {NOTHING_COUNTS}", True)] * len(cases)


@pytest.mark.parametrize("start", [started, started_deferred])
def test_a_run_stops_if_a_learned_scale_collapses(start: Any, glyphs: Path) -> None:
    task = start(glyphs, head__logits={"kind": "cosine", "learn_scale": True})
    take(task, 1)
    with torch.no_grad():
        task.head.log_scale.fill_(-20)
    with pytest.raises(FloatingPointError, match=r"the learned scale of the logits is e\^-20"):
        take(task, 2)
    task.strategy.close()
