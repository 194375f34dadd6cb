"""Steps whose outcome is decided on the device produce the same results as synchronous steps, and
the host does not wait for them.

On a CPU, `train.synchronous: false` runs the code for GPUs.
"""

import json
import math
import os
import signal
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainer.train
from data.loading.batch import Mixed
from heads.engine.inputs import NOTHING_COUNTS
from serving.addresses import free_port
from tests.host_reads import host_reads
from tests.ranks import forked, run_on_ranks
from tests.shards import glyph_recipe
from tests.system.processes import write_recipe
from tests.system.runs import losses
from tests.trainer.training import full_entries, share, started
from trainer.__main__ import main
from trainer.agreement import Agreement
from trainer.loss_scale import LossScale
from trainer.step import DeferredNumbers, Numbers, read_numbers, take_step
from trainer.task import Task
from trainer.world import leave

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


def started_flagged(shards: Path, class_ranks: int | None = None, **changes: Any) -> Task:
    """Return a task whose optimizers do not read the flag, as on a GPU with DeepSpeed: the host
    reads it before the update."""
    task = started(shards, class_ranks, **changes)
    task.is_flagged = True
    return task


def started_deferred(shards: Path, class_ranks: int | None = None, **changes: Any) -> Task:
    task = started(shards, class_ranks, train__synchronous=False, **changes)
    assert task.defers
    return task


def trained(start: Any, shards: Path, changes: dict[str, Any]) -> Results:
    task = start(shards, **changes)
    numbers = [take(task, step, rows) for step, rows in ((1, 12), (2, 12), (3, task.global_batch))]
    results = numbers, entries(task)
    task.strategy.close()
    return results


def trained_in_all_modes(shards: Path, cases: list[dict[str, Any]]) -> list[list[Results]]:
    modes = (started, started_flagged, started_deferred)
    return [[trained(start, shards, case) for start in modes] for case in cases]


DDP, FSDP = ({"train__strategy": {"kind": kind}} for kind in ("ddp", "fsdp"))
DEEPSPEED = [{"kind": "deepspeed", "stage": stage} for stage in (0, 1, 2, 3)]
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


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [(1, CASES[1::2]), (2, CASES)],  # one rank takes the same steps, without synchronization
    ids=lambda value: str(value if isinstance(value, int) else len(value)),
)
def test_all_modes_produce_the_same_results(
    num_ranks: int, cases: list[dict[str, Any]], glyphs: Path
) -> None:
    cases = [{**case, "train__global_batch": 12} for case in cases]
    for rank in run_on_ranks(num_ranks, trained_in_all_modes, glyphs, cases):
        for case, (synchronous, *others) in zip(cases, rank, strict=True):
            for other in others:
                assert_same_results(other, synchronous, case)


def assert_same_results(found: Results, expected: Results, case: dict[str, Any]) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4), case
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-3), case
        assert ours.skipped is theirs.skipped is False, case
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        np.testing.assert_allclose(
            found[1][name], value, rtol=2e-3, atol=2e-5, err_msg=f"{case} {name}"
        )


def skipped(start: Any, shards: Path, cases: list[dict[str, Any]]) -> list[Any]:
    """Take a step, a broken step and another step; return the names of the entries that the broken
    step changed, its reason, and the loss of the last step."""
    found = []
    for case in cases:
        task = start(shards, **case)
        take(task, 1)
        before = entries(task)
        numbers = take_broken(task, 2)
        assert numbers.skipped
        after = entries(task)
        changed = [name for name, value in before.items() if not np.array_equal(value, after[name])]
        found.append((changed, numbers.reason, take(task, 3).loss))
        task.strategy.close()
    return found


PARTS = {"train__micro_batches": 2}


@pytest.mark.parametrize(
    ("num_ranks", "start", "cases"),
    [
        (2, started_deferred, CASES),
        (2, started_flagged, [{**CASES[0], "train__strategy": kind} for kind in DEEPSPEED]),
        # The weights cannot be divided evenly among three ranks, so the pieces are padded.
        (3, started, [{**PARTS, **DDP}, {**PARTS, "train__strategy": DEEPSPEED[3]}]),
    ],
    ids=["deferred", "flagged", "synchronous"],
)
def test_a_skipped_step_changes_nothing_and_its_reason_names_the_rank(
    num_ranks: int, start: Any, cases: list[dict[str, Any]], glyphs: Path
) -> None:
    cases = [{**case, "train__ema": {"decay": 0.5}, "train__global_batch": 12} for case in cases]
    for rank in run_on_ranks(num_ranks, skipped, start, glyphs, cases):
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


def reads_of_steps(start: Any, shards: Path, cases: list[dict[str, Any]]) -> list[list[str]]:
    """Return the reads in the second step of each case. The first step creates the moments."""
    found = []
    for case in cases:
        options = dict(case)
        task = start(shards, options.pop("class_ranks", None), **options)
        take(task, 1)
        batch = share(task)
        with host_reads(batch.tensors()) as reads:
            taken = take_step(task, batch, 1.0, step=2)
        assert not read_numbers(task, taken).skipped
        found.append([line.rpartition(":")[0] for line in reads])  # without the line number
        task.strategy.close()
    return found


OPTIONS: list[dict[str, Any]] = [
    {**DDP, "train__ema": {"decay": 0.5}, "backbone__batch_norm": "local"},
    {**FSDP, "train__precision": "bf16", "train__activation_checkpointing": True},
    {**DDP, "head__weights__kind": "vtree", "head__class_weights": "balanced"},
    {**FSDP, "optimizer": {"kind": "adamw"}, "backbone__batch_norm": "frozen"},
]


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (2, [*CASES, *OPTIONS]),  # tests/heads/test_no_waiting.py covers each loss
        (4, [{**DDP, "class_ranks": 2}, {**FSDP, "class_ranks": 2, **CASES[4]}]),
    ],
    ids=lambda value: str(value if isinstance(value, int) else len(value)),
)
def test_a_deferred_step_reads_nothing_from_the_device(
    num_ranks: int, cases: list[dict[str, Any]], glyphs: Path
) -> None:
    cases = [{**case, "train__global_batch": 12} for case in cases]
    for rank in run_on_ranks(num_ranks, reads_of_steps, started_deferred, glyphs, cases):
        for case, reads in zip(cases, rank, strict=True):
            assert reads == [], case


def test_a_step_reads_once_if_its_optimizer_does_not_read_the_flag(glyphs: Path) -> None:
    """In stages 1 to 3, DeepSpeed itself reads more in its forward pass and its update."""
    cases = [{**DDP}, {**FSDP, "head__loss__kind": "batch_ce", "train__micro_batches": 2}]
    cases += [{"train__strategy": kind, "train__clip_norm": 0.1} for kind in DEEPSPEED]
    cases = [{**case, "train__global_batch": 12} for case in cases]
    for rank in run_on_ranks(2, reads_of_steps, started_flagged, glyphs, cases):
        for case, reads in zip(cases, rank, strict=True):
            ours = [read for read in reads if "trainer/strategies/deepspeed.py" not in read]
            assert ours == ["tolist at trainer/step.py"], case
            is_sharded = case["train__strategy"].get("stage", 0) > 0
            assert (reads == ours) is not is_sharded, case


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
    original = Agreement.start

    def start(*args: Any, **options: Any) -> Any:
        if (run / "metrics.jsonl").exists() and losses(run).keys() >= {1, 2}:
            raise OSError("the disk failed")
        return original(*args, **options)

    monkeypatch.setattr(Agreement, "start", start)
    assert main([recipe]) == 2
    assert "the disk failed" in capsys.readouterr().err
    assert sorted(losses(run)) == [1, 2, 3]
    (skipped_step,) = (run / "nonfinite-rank0.jsonl").read_text().splitlines()
    assert json.loads(skipped_step)["step"] == 3


class NeverReached:
    """The event of a step whose collectives never end on the device, because a rank is lost."""

    def query(self) -> bool:
        return False


def lose_rank_1(rank: int, port: int, recipe: str, is_flagged: bool, output: Path) -> None:
    """Train on two ranks. At the end of step 3, rank 1 is killed, and from then on rank 0 waits for
    its device."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")

    def take(task: Task, *args: Any, step: int, **options: Any) -> Any:
        task.is_flagged |= is_flagged
        if rank == 0 and step == 3:
            DeferredNumbers.event = NeverReached()
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
    return [
        forked(lose_rank_1, rank, port, path, mode == "flagged", folder / str(rank))
        for rank in (0, 1)
    ]


def test_a_rank_that_waits_for_its_device_exits_if_another_rank_is_lost(
    glyphs: Path, tmp_path: Path
) -> None:
    modes = ("synchronous", "flagged", "deferred")
    # The runs wait for most of their time, so they run in parallel.
    pairs = {
        mode: two_ranks(mode, glyphs, tmp_path / mode, free_port("127.0.0.1", 0)) for mode in modes
    }
    ranks = [process for pair in pairs.values() for process in pair]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
        for mode, pair in pairs.items():
            assert [process.exitcode for process in pair] == [1, -signal.SIGKILL], mode
            output = (tmp_path / mode / "0").read_text()
            assert output == "error: rank 0: another rank exited during a step\n", mode
    finally:
        for process in ranks:
            process.kill()
            process.join(60)


def test_labels_outside_the_classes_are_found_before_they_are_copied(glyphs: Path) -> None:
    task = started_deferred(glyphs)
    for step, where in ((1, ""), (2, "step 2, rank 0: ")):
        batch = share(task)
        batch.labels[2] = 13
        with pytest.raises(ValueError, match=rf"^{where}labels are outside 0\.\.12"):
            take_step(task, batch, 1.0, step=step)
        take(task, step)
    mixed = Mixed(torch.full((12,), -1), torch.full((12,), 0.5))
    with pytest.raises(
        ValueError, match=r"step 3, rank 0: labels are outside 0\.\.12 \(-1 to -1\)"
    ):
        take_step(task, replace(share(task), mixed=mixed), 1.0, step=3)


def without_counting_rows(shards: Path, cases: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Take a step in which no row has a positive weight. Return the error and whether the weights
    are unchanged."""
    found = []
    for case in cases:
        task = started_deferred(shards, **case)
        take(task, 1)
        before = entries(task)
        task.head.engine.class_weights.zero_()
        taken = take_step(task, share(task), 1.0, step=2)
        with pytest.raises(ValueError, match="step 2") as error:
            read_numbers(task, taken)
        after = entries(task)
        same = all(np.array_equal(value, after[name]) for name, value in before.items())
        found.append((str(error.value), same))
        task.strategy.close()
    return found


def test_a_batch_without_positive_row_weights_is_reported_one_step_late(glyphs: Path) -> None:
    weighted = {"train__global_batch": 12, "head__class_weights": "balanced"}
    cases = [weighted, {**weighted, **PARTS}, {**weighted, **PARTS, "head__loss__kind": "batch_ce"}]
    for rank in run_on_ranks(2, without_counting_rows, glyphs, cases):
        assert rank == [(f"step 2: {NOTHING_COUNTS}", True)] * len(cases)


@pytest.mark.parametrize("start", [started, started_flagged, started_deferred])
def test_a_run_stops_if_a_learned_scale_collapses(start: Any, glyphs: Path) -> None:
    task = start(glyphs, head__logits={"kind": "cosine", "learn_scale": True})
    take(task, 1)
    with torch.no_grad():
        task.head.log_scale.fill_(-20)
    with pytest.raises(FloatingPointError, match=r"the learned scale of the logits is e\^-20"):
        take(task, 2)
    task.strategy.close()
