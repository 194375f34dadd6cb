"""Training with class rows in bf16 and fp8, and with rows that the backward pass updates."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from heads.dtensors import local
from tests.ranks import rank_world, run_on_ranks
from tests.shards import glyph_recipe
from tests.system.processes import write_recipe
from tests.trainer.checkpoint_runs import save_checkpoint
from tests.trainer.training import each, full_array, resume, started, take, take_steps
from trainer.__main__ import main
from trainer.bundle.export import export_run
from trainer.checkpoints.entries import (
    training_entries,
)
from trainer.optimizers import rounded
from trainer.run.trained_run import open_trained
from trainer.task import Task

PLAIN = {"kind": "sgd", "lr": 0.5, "momentum": 0, "weight_decay": 0.01}


def fused(when: str, **options: Any) -> dict[str, Any]:
    return {**PLAIN, **options, "head": {"fused_sgd": when}}


def rows_of(task: Task) -> np.ndarray:
    """This rank's class rows in float32."""
    values = task.head.node_values()
    return values.read(slice(0, len(values.held))).float().numpy().copy()


def trained(shards: Path, changes: dict[str, Any], class_ranks: int | None = None) -> Any:
    """The numbers of three steps at different rates, the rows and the other weights."""
    task = started(shards, class_ranks, train__global_batch=12, **changes)
    numbers = [take(task, step, rate) for step, rate in ((1, 1.0), (2, 0.5), (3, 0.7))]
    entries = {
        name: full_array(tensor)
        for name, tensor in training_entries(task).items()
        if name not in ("head.weight", "head.row_scales") and not name.startswith("optimizer.")
    }
    results = numbers, rows_of(task), entries
    task.strategy.close()
    return results


CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["in_backward", "deferred"]),
    ({"train__clip_norm": 0.1}, ["deferred"]),
    ({"train__clip_norm": 1e6, "train__precision": "fp16"}, ["deferred"]),
    (
        {"train__micro_batches": 3, "head__weights__kind": "vtree", "train__ema": {"decay": 0.5}},
        ["in_backward", "deferred"],
    ),
    (
        {"head__loss__kind": "batch_ce", "head__logits": {"kind": "arcface", "scale": 8}},
        ["in_backward"],
    ),
]


def trained_in_every_mode(
    shards: Path, class_ranks: int | None, cases: list[tuple[dict[str, Any], list[str]]]
) -> list[list[Any]]:
    found = []
    for case, whens in cases:
        modes = [{"optimizer": PLAIN}]
        # tests/trainer/test_deferred.py compares deferred with synchronous steps.
        modes += [{"optimizer": fused(when), "train__synchronous": False} for when in whens]
        if not case:
            modes += [{"optimizer": fused(when)} for when in whens]
        found.append([trained(shards, {**case, **mode}, class_ranks) for mode in modes])
    return found


@pytest.mark.parametrize(
    ("num_ranks", "class_ranks", "cases"), [(2, None, CASES), (4, 2, CASES[3:])], ids=str
)
def test_fused_steps_equal_those_of_sgd(num_ranks, class_ranks, cases, glyphs):
    for rank in run_on_ranks(num_ranks, trained_in_every_mode, glyphs, class_ranks, cases):
        for (changes, whens), (plain, *others) in zip(cases, rank, strict=True):
            for index, (numbers, rows, entries) in enumerate(others):
                when = whens[index % len(whens)]
                has_norm = when == "in_backward" or "train__clip_norm" in changes
                for mine, want in zip(numbers, plain[0], strict=True):
                    assert mine.loss == pytest.approx(want.loss, rel=1e-4)
                    if has_norm:
                        assert mine.gradient_norm == pytest.approx(want.gradient_norm, rel=1e-3)
                np.testing.assert_allclose(rows, plain[1], rtol=2e-3, atol=2e-5)
                assert entries.keys() == plain[2].keys()
                for name, value in plain[2].items():
                    np.testing.assert_allclose(entries[name], value, rtol=2e-3, atol=2e-5)


OPTIMIZERS = {
    "in backward": fused("in_backward"),
    "momentum": {**PLAIN, "lr": 0.1, "momentum": 0.9},
    "adamw": {"kind": "adamw", "lr": 0.01},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_bf16_rows_follow_float32_rows(optimizer, glyphs):
    changes = {"optimizer": optimizer, "train__synchronous": False}
    exact = trained(glyphs, changes)
    found = trained(glyphs, {**changes, "head__dtype": "bf16"})
    for mine, want in zip(found[0], exact[0], strict=True):
        assert mine.loss == pytest.approx(want.loss, rel=2e-3)
    assert 0 < np.abs(found[1] - exact[1]).mean() < 0.01 * np.abs(exact[1]).mean()


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_steps_do_not_depend_on_the_number_of_rows_in_a_piece(kind, glyphs, monkeypatch):
    results = []
    for rows_at_once in (10_000, 3):
        monkeypatch.setattr(rounded, "rows_at_once", lambda *_, num=rows_at_once: num)
        task = started(glyphs, head__dtype="bf16", optimizer=OPTIMIZERS[kind])
        assert len(task.head.weight) > 3
        take_steps(task, 3)
        state = task.head_optimizer.state[task.head.weight]
        moments = [state[name].float().numpy() for name in sorted(state)]
        results.append([rows_of(task), *moments])
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_small_updates_of_bf16_rows_are_not_lost(glyphs):
    """Each step is smaller than half the distance between two bf16 numbers."""
    changes = {"optimizer": {"kind": "adamw", "lr": 1e-4, "weight_decay": 0}, "head__init_std": 1}
    tasks = [started(glyphs, **changes, head__dtype=dtype) for dtype in ("fp32", "bf16")]
    starts = [rows_of(task) for task in tasks]
    for task in tasks:
        take_steps(task, 40)
    exact, found = (rows_of(task) - start for task, start in zip(tasks, starts, strict=True))
    assert np.abs(exact).max() < 0.005
    assert np.corrcoef(exact.ravel(), found.ravel())[0, 1] > 0.6
    assert abs(np.vdot(found, exact) / np.vdot(exact, exact) - 1) < 0.1


TYPES: list[dict[str, Any]] = [
    {"head__dtype": "bf16", "optimizer": OPTIMIZERS["adamw"], "train__ema": {"decay": 0.5}},
    {"head__dtype": "bf16", "optimizer": fused("deferred"), "head__weights__kind": "vtree"},
    {"head__dtype": "fp8", "optimizer": fused("in_backward")},
]


def save(shards: Path, root: Path, changes: dict[str, Any]) -> Any:
    """Save a checkpoint after two steps. Return the rows at the checkpoint, and the rows and the
    moments after the next step."""
    task = started(shards, None, train__global_batch=12, **changes)
    for step in (1, 2):
        take(task, step)
    save_checkpoint(root, training_entries(task), {"step": 2}, task.world, keep=1)
    return _next_step(task)


def load(shards: Path, root: Path, changes: dict[str, Any]) -> Any:
    """Load the checkpoint of `save` and return the same."""
    task = started(shards, None, train__global_batch=12, **changes)
    resume(task, root)
    return _next_step(task)


def _next_step(task: Task) -> Any:
    before = rows_of(task)
    take(task, 3)
    moments = {
        name: local(tensor).double().numpy()
        for name, tensor in training_entries(task).items()
        if name.startswith(("optimizer.head.weight", "ema.head.weight"))
    }
    found = before, rows_of(task), moments
    task.strategy.close()
    return found


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 1)])
def test_a_resumed_run_takes_the_same_steps(before, after, glyphs, tmp_path):
    cases = [(glyphs, tmp_path / str(number), case) for number, case in enumerate(TYPES)]
    saved = run_on_ranks(before, each, save, cases)
    loaded = run_on_ranks(after, each, load, cases)
    for case in range(len(TYPES)):
        first, last = (
            [np.concatenate([rank[case][part] for rank in ranks]) for ranks in (saved, loaded)]
            for part in (0, 1)
        )
        np.testing.assert_array_equal(first[1], first[0])
        # With other ranks, sums are rounded in another order, and a few numbers to other neighbors.
        if before == after:
            np.testing.assert_array_equal(last[1], last[0])
        assert np.isclose(last[1], last[0], rtol=1e-4, atol=1e-6).mean() > 0.99
        for name, moment in saved[0][case][2].items():
            parts = [[rank[case][2][name] for rank in ranks] for ranks in (saved, loaded)]
            if moment.ndim:
                mine, want = (np.concatenate(each) for each in parts)
                assert np.isclose(mine, want, rtol=1e-2, atol=1e-6).mean() > 0.99
            else:
                assert parts[0][0] == parts[1][0] == 3


def broken(shards: Path) -> list[list[str]]:
    """The outcomes of steps whose backbone has a gradient that is not finite, on the last rank."""
    found = []
    for when, synchronous in product(("in_backward", "deferred"), (True, False)):
        options = {"train__synchronous": synchronous, "optimizer": fused(when)}
        task = started(shards, train__global_batch=12, **options)
        take(task, 1)
        before = rows_of(task)
        if task.world.rank == task.world.size - 1:
            parameter = next(task.backbone.parameters())
            parameter.register_hook(lambda grad: torch.full_like(grad, torch.inf))
        try:
            numbers = take(task, 2)
            assert numbers.skipped
            found.append([numbers.reason, str(np.array_equal(rows_of(task), before))])
        except FloatingPointError as error:
            found.append([str(error)])
        task.strategy.close()
    return found


def test_a_step_that_is_already_applied_to_the_rows_cannot_be_skipped(glyphs):
    for outcomes in run_on_ranks(2, broken, glyphs):
        for (message,) in outcomes[:2]:
            assert "set optimizer.head.fused_sgd=deferred" in message
        for reason, kept in outcomes[2:]:
            assert "the gradient norm is" in reason
            assert kept == "True"


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"head__dtype": "fp8"}, "head.dtype=bf16"),
        (
            {"optimizer": fused("in_backward"), "head__loss": {"kind": "ce", "sample_rate": 0.5}},
            "optimizer.head.weight_decay=0",
        ),
        (
            {"head__dtype": "fp8", "optimizer": fused("deferred"), "train__ema": {}},
            "remove train.ema",
        ),
    ],
)
def test_combinations_that_are_not_possible_are_refused(changes, fix, glyphs, tmp_path):
    with pytest.raises(ValueError, match=fix):
        glyph_recipe(glyphs, tmp_path, **changes)


@pytest.mark.parametrize("case", [0, 2])
def test_a_run_is_resumed_evaluated_and_exported(case, glyphs, tmp_path):
    for steps in (2, 4):
        recipe = glyph_recipe(
            glyphs, tmp_path / "run", **TYPES[case], train__duration={"steps": steps}
        )
        assert main([str(write_recipe(tmp_path, recipe))]) == 0
    export_run(recipe.run, tmp_path / "bundle", rank_world())
    (rows,) = load_file(tmp_path / "bundle" / "class_weights.safetensors").values()
    trained = open_trained(recipe.run, rank_world()).task.head
    blocks = list(trained.class_rows())
    want = torch.cat([block.rows for block in blocks])
    order = torch.cat([block.class_ids for block in blocks]).argsort()
    assert torch.equal(rows[:, : trained.dim], want[order])
