"""The whole grid of strategies, losses, weights, ranks and meshes, and of checkpoints between
them."""

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
    assert_alike,
    gone_on,
    gone_on_under_each,
    saved,
    trained,
    under_each,
)

ALL = list(range(len(STRATEGIES)))
_LOSSES, _WEIGHTS = ("ce", "batch_ce", "smooth_topk"), ("dense", "vtree")
_WORLDS = ((2, None), (2, 1), (3, None), (3, 1), (4, None), (4, 2), (4, 1))


def alike(folder: Path, count: int, _seed: int) -> Iterator[Trial]:
    """Losses and weights under every strategy beside one process, for the first `count` cases."""
    folder.mkdir(parents=True)
    shards = glyph_shards(folder)
    for loss, weights, (ranks, class_ranks) in list(product(_LOSSES, _WEIGHTS, _WORLDS))[:count]:
        changes = {"head__loss__kind": loss, "head__weights__kind": weights}
        expected = trained(shards, None, changes)
        what = f"{loss} x {weights}, {ranks} ranks, classes over {class_ranks or ranks}"
        yield _compared(what, expected, ranks, under_each, shards, class_ranks, changes, ALL)


def between(folder: Path, count: int, _seed: int) -> Iterator[Trial]:
    """A checkpoint of each strategy on 2 and 3 ranks, under every strategy on 1, 2, 3 and 4."""
    folder.mkdir(parents=True)
    shards = glyph_shards(folder)
    for number, ranks in list(product(ALL, (2, 3)))[:count]:
        changes = {**ADAMW_EMA, "train__strategy": STRATEGIES[number]}
        root = folder / f"{number}-{ranks}"
        expected, *_ = run_on_ranks(ranks, saved, shards, root, None, changes)
        what = f"{STRATEGIES[number]} on {ranks}"
        alone = gone_on(shards, root, None, {**changes, "train__strategy": STRATEGIES[0]})
        yield _judged(f"{what} -> 1", expected, [[alone]])
        for others in (2, 3, 4):
            given = (shards, root, 1 if others == 3 else None, changes, ALL)
            yield _compared(
                f"{what} -> all on {others}", expected, others, gone_on_under_each, *given
            )


def _compared(what: str, expected: Any, ranks: int, function: Any, *given: Any) -> Trial:
    try:
        found = run_on_ranks(ranks, function, *given)
    except RankError as error:
        return Trial(what, False, str(error).splitlines()[-1], None)
    return _judged(what, expected, found)


def _judged(what: str, expected: Any, ranks: list[Any]) -> Trial:
    for rank in ranks:
        for strategy, found in zip(STRATEGIES, rank, strict=False):
            try:
                assert_alike(found, expected, str(strategy))
            except AssertionError as error:
                return Trial(what, False, " ".join(str(error).split())[:300], None)
    return Trial(what, True, f"{len(ranks[0])} strategies alike", None)
