"""A recipe gives the same losses, weights and moments with every strategy, world size and mesh.

The tests marked slow cover the complete grids.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import run_on_ranks
from tests.trainer.checkpoint_runs import save_checkpoint
from tests.trainer.training import (
    Trained,
    assert_equal_results,
    each,
    full_entries,
    resume,
    started,
    take_steps,
    trained,
)
from trainer.checkpoints.entries import training_entries

STRATEGIES: list[dict[str, Any]] = [
    {"kind": "ddp"},
    {"kind": "fsdp"},
    {"kind": "fsdp", "reshard_after_forward": False},
    *({"kind": "deepspeed", "stage": stage} for stage in (0, 1, 2, 3)),
    {"kind": "fsdp", "shard_group": 2},
]


# Freeze batch norm, because the number of ranks determines which rows form a micro-batch.
IN_PARTS = {"train__micro_batches": 2, "backbone__batch_norm": "frozen"}
ADAMW_EMA = {
    # Use a large eps. The gradient of the tree root consists of nothing but rounding errors, which
    # Adam would amplify.
    "optimizer": {"kind": "adamw", "lr": 0.01, "eps": 1e-3},
    "head__weights__kind": "vtree",
    "train__ema": {"decay": 0.5},
}


def on_ranks(ranks: int) -> list[int]:
    """Return the numbers of the strategies that support this number of ranks."""
    groups = [strategy.get("shard_group", 1) for strategy in STRATEGIES]
    return [number for number, group in enumerate(groups) if ranks % group == 0]


def with_strategy(number: int, changes: dict[str, Any]) -> dict[str, Any]:
    return {**changes, "train__strategy": STRATEGIES[number]}


@pytest.mark.parametrize(
    ("world_size", "class_ranks", "changes", "strategies"),
    [
        (2, 1, {"head__loss__kind": "batch_ce", "head__weights__kind": "vtree"}, on_ranks(2)),
        (
            3,
            None,
            {"head__loss__kind": "smooth_topk", "optimizer": ADAMW_EMA["optimizer"]},
            [0, 1, 4],
        ),
        (4, 2, {"head__loss__kind": "batch_ce", **IN_PARTS}, [0, 1, 5, 7]),
        (3, 1, {"head__loss__kind": "ce", "train__global_batch": 7, **IN_PARTS}, [0, 2, 4, 6]),
    ],
)
def test_every_strategy_gives_the_same_results(
    world_size, class_ranks, changes, strategies, glyphs
):
    alone = trained(glyphs, None, changes)
    assert alone[0][2] < alone[0][0]
    cases = [(glyphs, class_ranks, with_strategy(number, changes)) for number in strategies]
    assert_all_equal(run_on_ranks(world_size, each, trained, cases), strategies, alone)


def assert_all_equal(ranks: list[list[Trained]], strategies: list[int], expected: Trained) -> None:
    for rank in ranks:
        for number, found in zip(strategies, rank, strict=True):
            assert_equal_results(found, expected, str(STRATEGIES[number]))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ce", "batch_ce", "smooth_topk"])
@pytest.mark.parametrize("weights", ["dense", "vtree"])
@pytest.mark.parametrize("mesh", [(2, None), (2, 1), (3, None), (3, 1), (4, None), (4, 2), (4, 1)])
def test_every_strategy_gives_the_same_results_on_every_mesh(loss, weights, mesh, glyphs):
    (ranks, class_ranks), changes = mesh, {"head__loss__kind": loss, "head__weights__kind": weights}
    alone, strategies = trained(glyphs, None, changes), on_ranks(ranks)
    cases = [(glyphs, class_ranks, with_strategy(number, changes)) for number in strategies]
    assert_all_equal(run_on_ranks(ranks, each, trained, cases), strategies, alone)


def saved(shards: Path, root: Path, changes: dict[str, Any]) -> Trained:
    """Train two steps, save a checkpoint, and train two more steps. Returns the losses of the last
    two steps and the final entries.
    """
    task = started(shards, **changes)
    take_steps(task, 2)
    save_checkpoint(root, training_entries(task), {"step": 2}, task.world, keep=1)
    return take_steps(task, 2, first=3), full_entries(task)


def resumed(shards: Path, root: Path, class_ranks: int | None, changes: dict[str, Any]) -> Trained:
    """Resume from the checkpoint that `saved` wrote, and train the two steps that follow it."""
    task = started(shards, class_ranks, **changes)
    resume(task, root)
    return take_steps(task, 2, first=3), full_entries(task)


# The strategies that save a checkpoint, by number of ranks.
SAVED = {2: [1, 4], 3: [0, 6], 4: [7]}


@pytest.fixture(scope="module")
def checkpoints(glyphs, tmp_path_factory) -> tuple[Path, dict[int, Trained]]:
    """A folder with a checkpoint of each strategy in SAVED, and the results of the next steps."""
    root, followed = tmp_path_factory.mktemp("checkpoints"), {}
    for ranks, strategies in SAVED.items():
        cases = [(glyphs, root / str(n), with_strategy(n, ADAMW_EMA)) for n in strategies]
        followed |= zip(strategies, run_on_ranks(ranks, each, saved, cases)[0], strict=True)
    return root, followed


@pytest.mark.parametrize(
    ("strategy", "loaded_on", "class_ranks", "others"),
    [
        (1, 3, 1, [0, 4, 6]),
        (6, 2, None, [1, 5]),
        (7, 2, 1, [1, 5]),
    ],
)
def test_a_checkpoint_of_one_strategy_resumes_with_another(
    strategy, loaded_on, class_ranks, others, glyphs, checkpoints
):
    root, expected = checkpoints[0] / str(strategy), checkpoints[1][strategy]
    alone = resumed(glyphs, root, None, with_strategy(0, ADAMW_EMA))
    assert_equal_results(alone, expected, f"{STRATEGIES[strategy]} -> one process")
    cases = [(glyphs, root, class_ranks, with_strategy(number, ADAMW_EMA)) for number in others]
    assert_all_equal(run_on_ranks(loaded_on, each, resumed, cases), others, expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", range(len(STRATEGIES)))
def test_a_checkpoint_of_every_strategy_resumes_with_every_strategy(strategy, glyphs, tmp_path):
    for ranks in (4,) if "shard_group" in STRATEGIES[strategy] else (2, 3):
        root = tmp_path / str(ranks)
        case = (glyphs, root, with_strategy(strategy, ADAMW_EMA))
        expected = run_on_ranks(ranks, saved, *case)[0]
        for others in (1, 2, 3, 4):
            strategies = on_ranks(others) if others > 1 else [0]
            cases = [(glyphs, root, None, with_strategy(n, ADAMW_EMA)) for n in strategies]
            assert_all_equal(run_on_ranks(others, each, resumed, cases), strategies, expected)


@pytest.mark.parametrize("ranks", SAVED)
def test_resuming_at_the_same_world_size_is_bit_identical(ranks, glyphs, checkpoints):
    """With more than two ranks, this requires that sums are computed in the same order."""
    root, expected = checkpoints
    strategies = SAVED[ranks]
    cases = [(glyphs, root / str(n), None, with_strategy(n, ADAMW_EMA)) for n in strategies]
    (found, *_) = run_on_ranks(ranks, each, resumed, cases)
    for strategy, (losses, entries) in zip(strategies, found, strict=True):
        assert losses == expected[strategy][0], STRATEGIES[strategy]
        for entry, value in expected[strategy][1].items():
            message = f"{STRATEGIES[strategy]} {entry}"
            np.testing.assert_array_equal(entries[entry], value, err_msg=message)
