"""Trains one recipe with every strategy, and resumes the checkpoint of each strategy with the
others. The default test suite runs some of the combinations, and slow tests run all of them.
"""

from pathlib import Path
from typing import Any

import numpy as np

from tests.trainer.checkpoint_runs import save_checkpoint
from tests.trainer.training import clip_gradients, full_entries, resume, share, started, take_steps
from trainer.checkpoints.entries import training_entries
from trainer.step import compute_gradients

STRATEGIES: list[dict[str, Any]] = [
    {"kind": "ddp"},
    {"kind": "fsdp"},
    {"kind": "fsdp", "reshard_after_forward": False},
    *({"kind": "deepspeed", "stage": stage} for stage in (0, 1, 2, 3)),
    {"kind": "fsdp", "shard_group": 2},
]


def on_ranks(ranks: int) -> list[int]:
    """Return the numbers of the strategies that support this number of ranks."""
    groups = [strategy.get("shard_group", 1) for strategy in STRATEGIES]
    return [number for number, group in enumerate(groups) if ranks % group == 0]


# Freeze batch norm, because the number of ranks determines which rows form a micro-batch.
IN_PARTS = {"train__micro_batches": 2, "backbone__batch_norm": "frozen"}
Trained = tuple[list[float], dict[str, np.ndarray]]


def trained(shards: Path, class_ranks: int | None, changes: dict[str, Any]) -> Trained:
    """Return the losses of three steps with the gradient norm of the next one, and all entries
    after the three steps.
    """
    task = started(shards, class_ranks, **changes)
    rows = changes.get("train__global_batch", 12)
    losses = take_steps(task, 3, rows=rows)
    entries = full_entries(task)
    compute_gradients(task, share(task, rows), step=4)
    norm = clip_gradients(task, None)
    task.strategy.close()
    return [*losses, norm], entries


def trained_with_each(
    shards: Path, class_ranks: int | None, changes: dict[str, Any], strategies: list[int]
) -> list[Trained]:
    """Train with one strategy after another on the same ranks, because starting ranks is slow."""
    return [
        trained(shards, class_ranks, {**changes, "train__strategy": STRATEGIES[number]})
        for number in strategies
    ]


def assert_equal_results(found: Trained, expected: Trained, name: str) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5, err_msg=name)
    assert found[1].keys() == expected[1].keys(), name
    for entry, value in expected[1].items():
        np.testing.assert_allclose(
            found[1][entry], value, rtol=2e-3, atol=2e-5, err_msg=f"{name} {entry}"
        )


def saved(shards: Path, root: Path, class_ranks: int | None, changes: dict[str, Any]) -> Trained:
    """Train two steps, save a checkpoint, and train two more steps. Returns the losses of the last
    two steps and the final entries.
    """
    task = started(shards, class_ranks, **changes)
    take_steps(task, 2)
    save_checkpoint(root, training_entries(task), {"step": 2}, task.world, keep=1)
    return take_steps(task, 2, first=3), full_entries(task)


def saved_with_each(shards: Path, root: Path, strategies: list[int]) -> dict[int, Trained]:
    """Call `saved` with ADAMW_EMA for several strategies, each with its own folder in `root`."""
    return {
        number: saved(
            shards, root / str(number), None, {**ADAMW_EMA, "train__strategy": STRATEGIES[number]}
        )
        for number in strategies
    }


def resumed(shards: Path, root: Path, class_ranks: int | None, changes: dict[str, Any]) -> Trained:
    """Resume from the checkpoint that `saved` wrote, and train the two steps that follow it."""
    task = started(shards, class_ranks, **changes)
    resume(task, root)
    return take_steps(task, 2, first=3), full_entries(task)


def resumed_with_each(
    shards: Path,
    root: Path,
    class_ranks: int | None,
    changes: dict[str, Any],
    strategies: list[int],
) -> list[Trained]:
    """Call `resumed` with several strategies."""
    return [
        resumed(shards, root, class_ranks, {**changes, "train__strategy": STRATEGIES[number]})
        for number in strategies
    ]


def resumed_with_the_same(shards: Path, root: Path, strategies: list[int]) -> dict[int, Trained]:
    """Resume each checkpoint that `saved_with_each` wrote with the strategy that wrote it."""
    return {
        number: resumed_with_each(shards, root / str(number), None, ADAMW_EMA, [number])[0]
        for number in strategies
    }


ADAMW_EMA = {
    # Use a large eps. The gradient of the tree root consists of nothing but rounding errors, which
    # Adam would amplify.
    "optimizer": {"kind": "adamw", "lr": 0.01, "eps": 1e-3},
    "head__weights__kind": "vtree",
    "train__ema": {"decay": 0.5},
}
