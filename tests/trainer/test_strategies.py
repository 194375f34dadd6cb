"""One recipe under every strategy, world size and mesh: the same losses, weights and moments."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import run_on_ranks
from tests.trainer.training import started, take_steps, whole_entries
from trainer.checkpoints import find_checkpoint, load_tensors, save_checkpoint
from trainer.entries import create_moments, restore_training, training_entries

STRATEGIES: list[dict[str, Any]] = [
    {"kind": "ddp"},
    {"kind": "fsdp"},
    {"kind": "fsdp", "reshard_after_forward": False},
    *({"kind": "deepspeed", "stage": stage} for stage in (0, 1, 2, 3)),
]
# Which rows batch norm sees together depends on the ranks then.
IN_PARTS = {"train__micro_batches": 2, "backbone__batch_norm": "frozen"}
Trained = tuple[list[float], dict[str, np.ndarray]]


def trained(shards: Path, class_ranks: int | None, changes: dict[str, Any]) -> Trained:
    task = started(shards, class_ranks, **changes)
    losses = take_steps(task, 3, rows=changes.get("train__global_batch", 12))
    entries = whole_entries(task)
    task.strategy.close()
    return losses, entries


def under_each(shards: Path, class_ranks: int | None, changes: dict[str, Any]) -> list[Trained]:
    """One after another in one world: starting processes is what costs."""
    return [
        trained(shards, class_ranks, {**changes, "train__strategy": strategy})
        for strategy in STRATEGIES
    ]


def assert_alike(found: Trained, expected: Trained, name: str) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5, err_msg=name)
    assert found[1].keys() == expected[1].keys(), name
    for entry, value in expected[1].items():
        np.testing.assert_allclose(
            found[1][entry], value, rtol=2e-3, atol=2e-5, err_msg=f"{name} {entry}"
        )


@pytest.mark.parametrize(
    ("world_size", "class_ranks", "changes"),
    [
        (2, None, {"head__loss__kind": "ce"}),
        (2, 1, {"head__loss__kind": "batch_ce", "head__weights__kind": "vtree"}),
        (3, None, {"head__loss__kind": "smooth_topk", "optimizer": {"kind": "adamw", "lr": 0.01}}),
        (4, 2, {"head__loss__kind": "smooth_topk", "head__weights__kind": "vtree"}),
        (4, 2, {"head__loss__kind": "batch_ce", **IN_PARTS}),
        (3, 1, {"head__loss__kind": "ce", "train__global_batch": 7, **IN_PARTS}),
    ],
)
def test_every_strategy_trains_alike(world_size, class_ranks, changes, glyphs):
    alone = trained(glyphs, None, changes)
    assert alone[0][2] < alone[0][0]
    for rank in run_on_ranks(world_size, under_each, glyphs, class_ranks, changes):
        for strategy, found in zip(STRATEGIES, rank, strict=True):
            assert_alike(found, alone, str(strategy))


def saved(shards: Path, root: Path, class_ranks: int | None, changes: dict[str, Any]):
    """Two steps, a checkpoint, and two more: the losses of those, and what is then."""
    task = started(shards, class_ranks, **changes)
    take_steps(task, 2)
    save_checkpoint(root, training_entries(task), {"step": 2}, task.world, keep=1)
    return take_steps(task, 2, first=3), whole_entries(task)


def gone_on(shards: Path, root: Path, class_ranks: int | None, changes: dict[str, Any]):
    """The two steps after that checkpoint."""
    task = started(shards, class_ranks, **changes)
    checkpoint, refused = find_checkpoint(root, task.world)
    assert checkpoint is not None
    assert not refused
    create_moments(task)
    entries = training_entries(task)
    load_tensors(checkpoint, entries, task.world)
    restore_training(task, entries)
    return take_steps(task, 2, first=3), whole_entries(task)


def gone_on_under_each(shards: Path, root: Path, class_ranks: int | None, changes: dict[str, Any]):
    return [
        gone_on(shards, root, class_ranks, {**changes, "train__strategy": strategy})
        for strategy in STRATEGIES
    ]


ADAMW_EMA = {
    # A large eps: the root of a tree has a gradient of rounding errors, which Adam would blow up.
    "optimizer": {"kind": "adamw", "lr": 0.01, "eps": 1e-3},
    "head__weights__kind": "vtree",
    "train__ema": {"decay": 0.5},
}


@pytest.mark.parametrize(
    ("strategy", "saved_on", "loaded_on", "class_ranks"),
    [
        (0, 3, 2, None),
        (1, 2, 3, 1),
        (3, 2, 2, None),
        (4, 2, 3, None),
        (5, 3, 2, 1),
        (6, 2, 4, 2),
    ],
)
def test_a_checkpoint_of_any_strategy_goes_on_under_every_other(
    strategy, saved_on, loaded_on, class_ranks, glyphs, tmp_path
):
    changes = {**ADAMW_EMA, "train__strategy": STRATEGIES[strategy]}
    (expected, *_) = run_on_ranks(saved_on, saved, glyphs, tmp_path, None, changes)
    for rank in run_on_ranks(loaded_on, gone_on_under_each, glyphs, tmp_path, class_ranks, changes):
        for other, found in zip(STRATEGIES, rank, strict=True):
            assert_alike(found, expected, f"{STRATEGIES[strategy]} -> {other}")


@pytest.mark.parametrize("strategy", range(len(STRATEGIES)))
def test_at_the_same_world_size_it_goes_on_with_the_same_bits(strategy, glyphs, tmp_path):
    changes = {**ADAMW_EMA, "train__strategy": STRATEGIES[strategy]}
    (expected, *_) = run_on_ranks(2, saved, glyphs, tmp_path, None, changes)
    (found, *_) = run_on_ranks(2, gone_on, glyphs, tmp_path, None, changes)
    assert found[0] == expected[0]
    for entry, value in expected[1].items():
        np.testing.assert_array_equal(found[1][entry], value, err_msg=entry)
