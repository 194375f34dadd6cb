"""A recipe gives the same losses, weights and moments with every strategy, world size and mesh.

The tests marked slow cover the complete grids.
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
    assert_equal_results,
    on_ranks,
    resumed_with_each,
    resumed_with_the_same,
    saved_with_each,
    trained,
    trained_with_each,
)


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
    arguments = (glyphs, class_ranks, changes, strategies)
    assert_all_equal(run_on_ranks(world_size, trained_with_each, *arguments), strategies, alone)


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
    arguments = (glyphs, class_ranks, changes, strategies)
    assert_all_equal(run_on_ranks(ranks, trained_with_each, *arguments), strategies, alone)


# The strategies that save a checkpoint, by number of ranks.
SAVED = {2: [1, 4], 3: [0, 6], 4: [7]}


@pytest.fixture(scope="module")
def checkpoints(glyphs, tmp_path_factory) -> tuple[Path, dict[int, Trained]]:
    """A folder with a checkpoint of each strategy in SAVED, and the results of the next steps."""
    root, followed = tmp_path_factory.mktemp("checkpoints"), {}
    for ranks, strategies in SAVED.items():
        followed |= run_on_ranks(ranks, saved_with_each, glyphs, root, strategies)[0]
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
    (alone,) = resumed_with_each(glyphs, root, None, ADAMW_EMA, [0])
    assert_equal_results(alone, expected, f"{STRATEGIES[strategy]} -> one process")
    arguments = (glyphs, root, class_ranks, ADAMW_EMA, others)
    assert_all_equal(run_on_ranks(loaded_on, resumed_with_each, *arguments), others, expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", range(len(STRATEGIES)))
def test_a_checkpoint_of_every_strategy_resumes_with_every_strategy(strategy, glyphs, tmp_path):
    for ranks in (4,) if "shard_group" in STRATEGIES[strategy] else (2, 3):
        root = tmp_path / str(ranks)
        expected = run_on_ranks(ranks, saved_with_each, glyphs, root, [strategy])[0][strategy]
        for others in (1, 2, 3, 4):
            strategies = on_ranks(others) if others > 1 else [0]
            arguments = (glyphs, root / str(strategy), None, ADAMW_EMA, strategies)
            found = run_on_ranks(others, resumed_with_each, *arguments)
            assert_all_equal(found, strategies, expected)


@pytest.mark.parametrize("ranks", SAVED)
def test_resuming_at_the_same_world_size_is_bit_identical(ranks, glyphs, checkpoints):
    """With more than two ranks, this requires that sums are computed in the same order."""
    root, expected = checkpoints
    (found, *_) = run_on_ranks(ranks, resumed_with_the_same, glyphs, root, SAVED[ranks])
    for strategy, (losses, entries) in found.items():
        assert losses == expected[strategy][0], STRATEGIES[strategy]
        for entry, value in expected[strategy][1].items():
            message = f"{STRATEGIES[strategy]} {entry}"
            np.testing.assert_array_equal(entries[entry], value, err_msg=message)
