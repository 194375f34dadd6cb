"""Trains one recipe under every strategy, and goes on from a checkpoint of one under the others:
what the suite tries in part and the soak in full."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.trainer.training import started, take_steps, whole_entries
from trainer.checkpoints import find_checkpoint, load_tensors, save_checkpoint
from trainer.checkpoints.entries import create_moments, restore_training, training_entries

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


def under_each(
    shards: Path, class_ranks: int | None, changes: dict[str, Any], strategies: list[int]
) -> list[Trained]:
    """One after another in one world: starting processes is what costs."""
    return [
        trained(shards, class_ranks, {**changes, "train__strategy": STRATEGIES[number]})
        for number in strategies
    ]


def assert_alike(found: Trained, expected: Trained, name: str) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5, err_msg=name)
    assert found[1].keys() == expected[1].keys(), name
    for entry, value in expected[1].items():
        np.testing.assert_allclose(
            found[1][entry], value, rtol=2e-3, atol=2e-5, err_msg=f"{name} {entry}"
        )


def saved(shards: Path, root: Path, class_ranks: int | None, changes: dict[str, Any]) -> Trained:
    """Two steps, a checkpoint, and two more: the losses of those, and what is then."""
    task = started(shards, class_ranks, **changes)
    take_steps(task, 2)
    save_checkpoint(root, training_entries(task), {"step": 2}, task.world, keep=1)
    return take_steps(task, 2, first=3), whole_entries(task)


def saved_under_each(shards: Path, root: Path, strategies: list[int]) -> dict[int, Trained]:
    """The same with ADAMW_EMA under several strategies, each with a folder of its own in `root`."""
    return {
        number: saved(
            shards, root / str(number), None, {**ADAMW_EMA, "train__strategy": STRATEGIES[number]}
        )
        for number in strategies
    }


def gone_on(shards: Path, root: Path, class_ranks: int | None, changes: dict[str, Any]) -> Trained:
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


def gone_on_under_each(
    shards: Path,
    root: Path,
    class_ranks: int | None,
    changes: dict[str, Any],
    strategies: list[int],
) -> list[Trained]:
    """The same under several strategies."""
    return [
        gone_on(shards, root, class_ranks, {**changes, "train__strategy": STRATEGIES[number]})
        for number in strategies
    ]


def gone_on_where_saved(shards: Path, root: Path, strategies: list[int]) -> dict[int, Trained]:
    """The steps after the checkpoints of `saved_under_each`, each under its own strategy."""
    return {
        number: gone_on_under_each(shards, root / str(number), None, ADAMW_EMA, [number])[0]
        for number in strategies
    }


ADAMW_EMA = {
    # A large eps: the root of a tree has a gradient of rounding errors, which Adam would blow up.
    "optimizer": {"kind": "adamw", "lr": 0.01, "eps": 1e-3},
    "head__weights__kind": "vtree",
    "train__ema": {"decay": 0.5},
}
