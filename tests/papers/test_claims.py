"""Tests that the papers' claims are evaluated in the right direction.

Each claim is checked with invented numbers for which the published winner clearly wins, and again
with those numbers mirrored.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from experiments.papers.comparison import Compared
from experiments.papers.experiments import mnist, published_networks, tree_norms, tree_synthetic
from experiments.papers.experiments.published_networks import TABLES, CifarTable
from experiments.papers.experiments.tree_synthetic import Arm
from experiments.papers.job import Measures
from experiments.papers.section import Claim
from experiments.papers.tree_simulation import Regime

# Arm -> measure -> level of its runs. `around` spreads the runs around it.
Levels = Mapping[str, Mapping[str, float]]

_SEEDS = 3
_HOLDS, _NOT, _OPEN = "holds", "does not hold", "not settled"


def around(level: float, number: int) -> np.ndarray:
    """Return one value per seed, near `level`. The spread depends on `number`, so pairs differ."""
    return level + np.random.default_rng(number).uniform(-0.005, 0.005, _SEEDS)


def compared(levels: Levels) -> Compared[str]:
    """Return a comparison whose arms reach these levels, at rates inside of their searches."""
    runs: dict[str, list[Measures]] = {}
    for number, (arm, of_arm) in enumerate(levels.items()):
        by_measure = {name: around(level, number) for name, level in of_arm.items()}
        runs[arm] = [{name: of[seed] for name, of in by_measure.items()} for seed in range(_SEEDS)]
    return Compared({arm: {0.01: 0.1, 0.1: 0.9, 1.0: 0.2} for arm in levels}, runs)


def mirrored(levels: Levels) -> Levels:
    return {arm: {name: 1 - level for name, level in of.items()} for arm, of in levels.items()}


def verdicts(claims: Sequence[Claim]) -> list[str]:
    return [claim.verdict for claim in claims]


# ---------------------------------------------------------------- MNIST

_NAMED = ("self_norm", "nce", "bce", "batch_ce", "batch_max_margin")
_SINGLE_LOGITS: dict[str, dict[str, float]] = {
    loss: dict.fromkeys(mnist.MEASURES, 0.8 if mnist.ALIGNED[loss] else 0.3)
    for loss in mnist.LOSSES
}
_SINGLE_LOGITS["ce"] |= {f"all_logits/{measure}": 0.6 for measure in mnist.MEASURES}


def test_single_logit_claims_hold_only_if_aligned_losses_win() -> None:
    *claims, _ = mnist.single_logit_claims(compared(_SINGLE_LOGITS))
    assert set(verdicts(claims)) == {_HOLDS}
    *claims, _ = mnist.single_logit_claims(compared(mirrored(_SINGLE_LOGITS)))
    assert set(verdicts(claims)) == {_NOT}


@pytest.mark.parametrize("loss", _NAMED)
def test_a_single_logit_claim_uses_the_loss_that_it_names(loss: str) -> None:
    levels = {**_SINGLE_LOGITS, loss: dict.fromkeys(mnist.MEASURES, 0.1)}
    # Compare the first word as a whole, because "batch_ce" and "bce" have the same ending.
    claims = mnist.single_logit_claims(compared(levels))
    found = [(claim.statement.split()[0], claim.verdict) for claim in claims]
    of_losses = {name: verdict for name, verdict in found if name in _NAMED}
    assert of_losses == {name: _NOT if name == loss else _HOLDS for name in _NAMED}


@pytest.mark.parametrize(
    ("of_one", "expected"),
    [((0.9, 0.9, 0.9), _NOT), ((0.1, 0.1, 0.1), _NOT), ((0.9, 0.1, 0.9), _HOLDS),
     ((0.9, 0.9, 0.6), _OPEN)],
)  # fmt: skip
def test_one_logit_is_comparable_if_neither_wins_in_all_measures(
    of_one: Sequence[float], expected: str
) -> None:
    one_logit = dict(zip(mnist.MEASURES, of_one, strict=True))
    *_, claim = mnist.single_logit_claims(compared({**_SINGLE_LOGITS, "batch_ce": one_logit}))
    assert "comparable" in claim.statement
    assert claim.verdict == expected


def test_the_mean_relative_improvement_matches_a_manual_computation() -> None:
    # One minus the measure is 0.2 for aligned losses and 0.7 for the others.
    for measure in mnist.MEASURES:
        found = mnist.improvement(compared(_SINGLE_LOGITS), measure)
        assert found.value == pytest.approx(1 - 0.2 / 0.7, abs=0.01)
    # An improvement of 10% is below the 20% of the paper's headline.
    little = {
        loss: dict.fromkeys(of, 0.37 if mnist.ALIGNED[loss] else 0.3)
        for loss, of in _SINGLE_LOGITS.items()
    }
    claims = mnist.single_logit_claims(compared(little))
    improved = [claim for claim in claims if "relative improvement" in claim.statement]
    assert verdicts(improved) == [_NOT] * 3


def test_spherical_claims_hold_if_taylor_wins_and_spherical_softmax_loses() -> None:
    levels = {"taylor_softmax": 0.9, "ce": 0.8, "spherical_softmax": 0.6}
    reached = {loss: {"top1": level} for loss, level in levels.items()}
    assert verdicts(mnist.spherical_claims(compared(reached))) == [_HOLDS] * 2
    assert verdicts(mnist.spherical_claims(compared(mirrored(reached)))) == [_NOT] * 2


# ---------------------------------------------------------------- published networks


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_contrast_holds_only_if_the_published_winner_wins(table: CifarTable) -> None:
    for one in table.contrasts:
        assert {one.better, one.worse} <= set(table.heads)
        of_worse = one.of_worse or one.measure
        measures = {of_worse, one.measure, *table.measures}
        for wins, expected in ((0.8, _HOLDS), (0.3, _NOT)):
            levels: dict[str, dict[str, float]] = {
                arm: dict.fromkeys([*measures, *(f"best/{name}" for name in table.measures)], 0.5)
                for arm in table.heads
            }
            levels[one.better][one.measure] = wins
            claims = table.section(compared(levels), 1).claims
            assert {claim.statement: claim.verdict for claim in claims}[one.statement] == expected


def test_ccql_is_closer_to_ce_matches_a_manual_computation() -> None:
    for level, expected in ((0.7, _HOLDS), (0.4, _NOT)):
        levels = {"ce": 0.8, "ccql": level, "quadratic": 0.3}
        reached = {loss: {"test/top1": of} for loss, of in levels.items()}
        (claim,) = published_networks.ccql_is_closer_to_ce(compared(reached))
        assert claim.verdict == expected


# ---------------------------------------------------------------- synthetic experiments

_POINTS = {
    name: [(value, [Arm(Regime(n=int(value)), "text", loss) for loss in ("tree", "ce")])
           for value in (16, 64)]
    for name in ("n",)
}  # fmt: skip


def measured(levels: Mapping[Arm, float], *, at_authors_rate: Mapping[Arm, float]) -> Compared[Arm]:
    """Return arms with accuracies near these levels at their own and at the authors' rate."""
    return Compared(
        {arm: {0.01: 0.1, 0.1: 0.9, 1.0: 0.2} for arm in levels},
        {
            arm: [
                {"own": own, "authors": authors}
                for own, authors in zip(
                    around(levels[arm], n), around(at_authors_rate[arm], n), strict=True
                )
            ]
            for n, arm in enumerate(levels)
        },
    )


def test_a_tree_beats_cross_entropy_everywhere_only_if_no_gain_is_unsettled() -> None:
    ((_, (tree, plain)), (_, (other_tree, other_plain))) = _POINTS["n"]
    for levels, expected in (
        ((0.9, 0.5, 0.8, 0.6), _HOLDS),
        ((0.9, 0.5, 0.5, 0.8), _NOT),
        ((0.9, 0.5, 0.6, 0.6), _OPEN),
    ):
        own = dict(zip((tree, plain, other_tree, other_plain), levels, strict=True))
        mirrored_levels = {arm: 1 - level for arm, level in own.items()}
        found = measured(own, at_authors_rate=mirrored_levels)
        gains = tree_synthetic._gains(found, _POINTS["n"], 1, "own")
        assert tree_synthetic._everywhere(gains) == expected
        if expected == _HOLDS:
            at_rate = tree_synthetic._gains(found, _POINTS["n"], 1, "authors")
            assert tree_synthetic._everywhere(at_rate) == _NOT


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ({1.1: 0.6, 1.3: 0.9, 2.0: 0.7}, _HOLDS),
        ({1.1: 0.7, 1.3: 0.5, 2.0: 0.8}, _NOT),
        ({1.1: 0.6, 1.3: 0.9, 2.0: 0.899}, _OPEN),
        ({1.1: 0.7, 1.3: 0.8, 2.0: 0.801}, _OPEN),
        ({1.1: 0.6, 1.2: 0.899, 1.3: 0.9, 2.0: 0.7}, _HOLDS),
        ({1.3: 0.5, 2.0: 0.8, 5.0: 0.801}, _NOT),
    ],
)
def test_a_base_of_about_1_3_is_or_is_not_best_if_all_on_the_other_side_are_worse(
    levels: Mapping[float, float], expected: str
) -> None:
    arms = {base: Arm(Regime(), "text", "tree", base) for base in levels}
    found = measured({arms[base]: level for base, level in levels.items()},
                     at_authors_rate=dict.fromkeys(arms.values(), 0.5))  # fmt: skip
    points = [(base, [arm]) for base, arm in arms.items()]
    assert tree_synthetic._best_base(found, points, "", "own").verdict == expected


_CLASSES = (10, 100, 1000)


def powers(power: float, number: int) -> list[list[float]]:
    """Return norms [draw, number of classes] that grow about as this power of the class count."""
    return [(np.array(_CLASSES) ** exact).tolist() for exact in around(power, number)]


def test_a_norm_grows_more_slowly_if_its_exponent_is_smaller() -> None:
    for power, expected in ((0.5, _HOLDS), (0.2, _NOT)):
        found = {"W*": powers(power, 1), "V*": powers(0.3, 2)}
        claim = tree_norms._slower(_CLASSES, found, "V*")
        assert claim.verdict == expected


def test_a_bound_holds_if_no_norm_exceeds_it() -> None:
    for of_norms, expected in (([1.0, 2.0], _HOLDS), ([1.0, 3.0], _NOT)):
        line = {"classes": [2, 4], "norms": of_norms, "bounds": [1.5, 2.5]}
        assert tree_norms._lemma(line).verdict == expected
