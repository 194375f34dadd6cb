"""One recipe under every strategy, world size and mesh: the same losses, weights and moments.

Parts of the grids of `make soak`, which tries them in full.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.ranks import run_on_ranks
from tests.trainer.strategies import (
    ADAMW_EMA,
    IN_PARTS,
    STRATEGIES,
    Trained,
    assert_alike,
    gone_on_under_each,
    gone_on_where_saved,
    saved_under_each,
    trained,
    under_each,
)

ALL = list(range(len(STRATEGIES)))


@pytest.mark.parametrize(
    ("world_size", "class_ranks", "changes", "strategies"),
    [
        (2, 1, {"head__loss__kind": "batch_ce", "head__weights__kind": "vtree"}, ALL),
        (3, None, {"head__loss__kind": "smooth_topk", "optimizer": {"kind": "lamb"}}, [0, 1, 3]),
        (4, 2, {"head__loss__kind": "batch_ce", **IN_PARTS}, [0, 1, 5, 6]),
        (3, 1, {"head__loss__kind": "ce", "train__global_batch": 7, **IN_PARTS}, [0, 2, 4, 6]),
    ],
)
def test_every_strategy_trains_alike(world_size, class_ranks, changes, strategies, glyphs):
    alone = trained(glyphs, None, changes)
    assert alone[0][2] < alone[0][0]
    for rank in run_on_ranks(world_size, under_each, glyphs, class_ranks, changes, strategies):
        for number, found in zip(strategies, rank, strict=True):
            assert_alike(found, alone, str(STRATEGIES[number]))


# By number of ranks, the strategies that save there.
SAVED = {2: [1, 4], 3: [0, 6]}


@pytest.fixture(scope="module")
def checkpoints(glyphs, tmp_path_factory) -> tuple[Path, dict[int, Trained]]:
    """A folder with a checkpoint of each strategy of SAVED, and the steps that followed it."""
    root, followed = tmp_path_factory.mktemp("checkpoints"), {}
    for ranks, strategies in SAVED.items():
        followed |= run_on_ranks(ranks, saved_under_each, glyphs, root, strategies)[0]
    return root, followed


@pytest.mark.parametrize(
    ("strategy", "loaded_on", "class_ranks", "others"),
    [
        (1, 3, 1, [0, 4, 6]),
        (6, 2, None, [1, 3, 5]),
        (4, 4, 2, [0, 6]),
    ],
)
def test_a_checkpoint_of_one_strategy_goes_on_under_another(
    strategy, loaded_on, class_ranks, others, glyphs, checkpoints
):
    root, expected = checkpoints[0] / str(strategy), checkpoints[1][strategy]
    (alone,) = gone_on_under_each(glyphs, root, None, ADAMW_EMA, [0])
    assert_alike(alone, expected, f"{STRATEGIES[strategy]} -> one process")
    for rank in run_on_ranks(
        loaded_on, gone_on_under_each, glyphs, root, class_ranks, ADAMW_EMA, others
    ):
        for number, found in zip(others, rank, strict=True):
            assert_alike(found, expected, f"{STRATEGIES[strategy]} -> {STRATEGIES[number]}")


@pytest.mark.parametrize("ranks", SAVED)
def test_at_the_same_world_size_it_goes_on_with_the_same_bits(ranks, glyphs, checkpoints):
    """On three ranks a sum depends on its order, as it does not on two."""
    root, expected = checkpoints
    (found, *_) = run_on_ranks(ranks, gone_on_where_saved, glyphs, root, SAVED[ranks])
    for strategy, (losses, entries) in found.items():
        assert losses == expected[strategy][0], STRATEGIES[strategy]
        for entry, value in expected[strategy][1].items():
            message = f"{STRATEGIES[strategy]} {entry}"
            np.testing.assert_array_equal(entries[entry], value, err_msg=message)
