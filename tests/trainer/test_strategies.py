"""One recipe under every strategy, world size and mesh: the same losses, weights and moments.

Parts of the grids of `make soak`, which tries them in full.
"""

import numpy as np
import pytest

from tests.ranks import run_on_ranks
from tests.trainer.strategies import (
    ADAMW_EMA,
    IN_PARTS,
    STRATEGIES,
    assert_alike,
    gone_on,
    gone_on_under_each,
    saved,
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


@pytest.mark.parametrize(
    ("strategy", "saved_on", "loaded_on", "class_ranks", "others"),
    [
        (1, 2, 3, 1, [0, 4, 6]),
        (6, 3, 2, None, [1, 3, 5]),
        (4, 2, 4, 2, [0, 6]),
    ],
)
def test_a_checkpoint_of_one_strategy_goes_on_under_another(
    strategy, saved_on, loaded_on, class_ranks, others, glyphs, tmp_path
):
    changes = {**ADAMW_EMA, "train__strategy": STRATEGIES[strategy]}
    (expected, *_) = run_on_ranks(saved_on, saved, glyphs, tmp_path, None, changes)
    alone = gone_on(glyphs, tmp_path, None, {**changes, "train__strategy": STRATEGIES[0]})
    assert_alike(alone, expected, f"{STRATEGIES[strategy]} -> one process")
    for rank in run_on_ranks(
        loaded_on, gone_on_under_each, glyphs, tmp_path, class_ranks, changes, others
    ):
        for number, found in zip(others, rank, strict=True):
            assert_alike(found, expected, f"{STRATEGIES[strategy]} -> {STRATEGIES[number]}")


@pytest.mark.parametrize(("strategy", "ranks"), [(0, 3), (1, 2), (4, 2), (6, 3)])
def test_at_the_same_world_size_it_goes_on_with_the_same_bits(strategy, ranks, glyphs, tmp_path):
    """On three ranks a sum depends on its order, as it does not on two."""
    changes = {**ADAMW_EMA, "train__strategy": STRATEGIES[strategy]}
    (expected, *_) = run_on_ranks(ranks, saved, glyphs, tmp_path, None, changes)
    (found, *_) = run_on_ranks(ranks, gone_on, glyphs, tmp_path, None, changes)
    assert found[0] == expected[0]
    for entry, value in expected[1].items():
        np.testing.assert_array_equal(found[1][entry], value, err_msg=entry)
