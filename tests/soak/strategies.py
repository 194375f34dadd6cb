"""The full grid of strategies, losses, weights, ranks and meshes, and checkpoints resumed with
another strategy.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from tests.ranks import RankError, run_on_ranks
from tests.shards import glyph_shards
from tests.soak.trials import Trial
from tests.trainer.strategies import (
    ADAMW_EMA,
    STRATEGIES,
    assert_equal_results,
    on_ranks,
    resumed,
    resumed_with_each,
    saved,
    trained,
    trained_with_each,
)

_LOSSES, _WEIGHTS = ("ce", "batch_ce", "smooth_topk"), ("dense", "vtree")
_WORLDS = ((2, None), (2, 1), (3, None), (3, 1), (4, None), (4, 2), (4, 1))


def same_results(folder: Path, count: int, _seed: int) -> Iterator[Trial]:
    """Compare the losses and weights of every strategy with those of a single process, for the
    first `count` cases.
    """
    folder.mkdir(parents=True)
    shards = glyph_shards(folder)
    for loss, weights, (ranks, class_ranks) in list(product(_LOSSES, _WEIGHTS, _WORLDS))[:count]:
        changes = {"head__loss__kind": loss, "head__weights__kind": weights}
        expected = trained(shards, None, changes)
        what = f"{loss} x {weights}, {ranks} ranks, classes over {class_ranks or ranks}"
        arguments = (shards, class_ranks, changes, on_ranks(ranks))
        yield _compared(what, expected, ranks, trained_with_each, *arguments)


def between(folder: Path, count: int, _seed: int) -> Iterator[Trial]:
    """Save a checkpoint with each strategy on 2 and 3 ranks (4 ranks with a `shard_group`), and
    resume it with every strategy on 1 to 4 ranks.
    """
    folder.mkdir(parents=True)
    shards = glyph_shards(folder)
    cases = [
        (number, ranks)
        for number, strategy in enumerate(STRATEGIES)
        for ranks in ((4,) if "shard_group" in strategy else (2, 3))
    ]
    for number, ranks in cases[:count]:
        changes = {**ADAMW_EMA, "train__strategy": STRATEGIES[number]}
        root = folder / f"{number}-{ranks}"
        expected, *_ = run_on_ranks(ranks, saved, shards, root, None, changes)
        what = f"{STRATEGIES[number]} on {ranks}"
        alone = resumed(shards, root, None, {**changes, "train__strategy": STRATEGIES[0]})
        yield _judged(f"{what} -> 1", expected, [[alone]])
        for others in (2, 3, 4):
            class_ranks = 1 if others == 3 else None
            arguments = (shards, root, class_ranks, changes, on_ranks(others))
            yield _compared(
                f"{what} -> all on {others}", expected, others, resumed_with_each, *arguments
            )


def _compared(what: str, expected: Any, ranks: int, function: Any, *arguments: Any) -> Trial:
    try:
        found = run_on_ranks(ranks, function, *arguments)
    except RankError as error:
        return Trial(what, False, str(error).splitlines()[-1], None)
    return _judged(what, expected, found)


def _judged(what: str, expected: Any, ranks: list[Any]) -> Trial:
    for rank in ranks:
        for strategy, found in zip(STRATEGIES, rank, strict=False):
            try:
                assert_equal_results(found, expected, str(strategy))
            except AssertionError as error:
                return Trial(what, False, " ".join(str(error).split())[:300], None)
    return Trial(what, True, f"{len(ranks[0])} strategies equal", None)
