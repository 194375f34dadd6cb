"""Thresholds keep what they promise, checked on known distributions and against brute force."""

from dataclasses import asdict

import numpy as np
import pytest
import torch
from scipy import stats

from heads import ClassHead, ClassRows
from heads.losses import CrossEntropy
from tests.heads.cases import label_tree
from tests.ranks import rank_world, run_on_ranks
from trainer.promises import KINDS, Promises, least_positives, make_promises
from trainer.promises.bounds import (
    exact_pass_rates,
    guaranteed_pass_rates,
    guaranteed_rank,
    wilson_interval,
)
from trainer.promises.class_groups import groups_of_head, groups_of_rows, groups_of_tree

# 0.999 quantile of the number of standard errors by which a share may differ from its expectation.
Z = 3.1


def promises_of(*samples) -> Promises:
    return make_promises(*samples).by_class()


class World:
    """Classes whose scores have a known distribution: normal, or Student's t with 3 degrees of
    freedom, around centers that are similar within a group.
    """

    def __init__(self, num_samples: tuple[int, int], *, tails: str = "normal", seed: int = 0):
        rng, num_classes, num_groups = np.random.default_rng(seed), 2000, 60
        self.groups = rng.integers(num_groups, size=num_classes)
        self.centers = rng.normal(size=num_groups)[self.groups] + rng.normal(size=num_classes)
        self.scales = np.exp(rng.normal(0, 0.2, num_classes))
        self.noise = stats.norm() if tails == "normal" else stats.t(3)
        num = rng.integers(*num_samples, size=num_classes, endpoint=True)
        self.labels = np.repeat(np.arange(num_classes), num)
        noise = self.noise.rvs(len(self.labels), random_state=rng)
        self.scores = self.centers[self.labels] + self.scales[self.labels] * noise

    def promises(self, recalls=(0.9, 0.99), confidence: float = 0.9) -> Promises:
        return promises_of(self.scores, self.labels, self.groups, recalls, confidence)

    def pass_rates(self, thresholds: np.ndarray) -> np.ndarray:
        """Return the true pass rate of a threshold of each class."""
        return self.noise.sf((thresholds - self.centers) / self.scales)


def is_kind(promises: Promises, column: int, kind: str) -> np.ndarray:
    return promises.kinds[:, column] == KINDS.index(kind)


def standard_error(share: float, num: int) -> float:
    return np.sqrt(share * (1 - share) / num)


@pytest.mark.parametrize("recall", [0.5, 0.8, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_the_guaranteed_rank_is_the_largest_that_satisfies_the_binomial_bound(recall, confidence):
    num = np.arange(1, 600)
    rank = guaranteed_rank(num, recall, confidence)
    holds = stats.binom.sf(rank - 1, num, 1 - recall) >= confidence - 1e-12
    assert (holds | (rank == 0)).all()
    next_holds = stats.binom.sf(rank, num, 1 - recall) >= confidence + 1e-12
    assert not (next_holds & (rank < num)).any()
    least = least_positives(recall, confidence)
    if least is None or least > 599:
        assert not rank.any()
    else:
        assert num[rank > 0].min() == least


def test_intervals_equal_those_of_scipy():
    for hits, num in ((0, 4), (3, 7), (9, 9), (40, 200)):
        result = stats.binomtest(hits, num)
        exact = result.proportion_ci(0.9, "exact")
        found = exact_pass_rates(np.array([hits]), np.array([num]), 0.9)[0]
        assert found.tolist() == pytest.approx([hits / num, exact.low, exact.high])
        assert wilson_interval(hits, num, 0.9) == pytest.approx(result.proportion_ci(0.9, "wilson"))
    nothing = exact_pass_rates(np.array([0]), np.array([0]), 0.9)[0]
    assert nothing[1:].tolist() == [0, 1]
    rank = guaranteed_rank(38, 0.9, 0.9)
    found = guaranteed_pass_rates(np.array([38]), rank[None], 0.9)[0]
    expected = stats.beta(38 - rank + 1, rank)
    assert found.tolist() == pytest.approx([expected.mean(), expected.ppf(0.1), 1.0])
    assert found[1] >= 0.9


@pytest.mark.parametrize(("tails", "confidence"), [("normal", 0.95), ("heavy", 0.8)])
def test_a_guaranteed_threshold_reaches_its_recall_with_the_stated_confidence(tails, confidence):
    world = World((60, 90), tails=tails)
    promises = world.promises((0.9, 0.95), confidence)
    for column, recall in enumerate(promises.recalls):
        own = is_kind(promises, column, "guaranteed")
        assert own.all()
        pass_rates = world.pass_rates(promises.thresholds[:, column])
        share = (pass_rates >= recall).mean()
        assert share >= confidence - Z * standard_error(confidence, len(own))
        # The lower end of the interval is exact, except for the rounding margin.
        share = (pass_rates >= promises.pass_rates[:, column, 1]).mean()
        assert abs(share - confidence) < Z * standard_error(confidence, len(own))


def test_ties_and_discrete_scores_keep_the_guarantee():
    rng, num_classes, num = np.random.default_rng(0), 3000, 30
    scores = rng.integers(5, size=num_classes * num)  # a new score is 0 with probability 0.2
    labels = np.repeat(np.arange(num_classes), num)
    promises = promises_of(scores, labels, np.zeros(num_classes, np.int64), (0.8,), 0.9)
    pass_rates = 1 - np.ceil(np.clip(promises.thresholds[:, 0], 0, 5)) / 5
    share = (pass_rates >= 0.8).mean()
    assert share >= 0.9 - Z * standard_error(0.9, num_classes)


@pytest.mark.parametrize(
    ("num_samples", "tails"), [((1, 6), "normal"), ((8, 20), "heavy"), ((0, 40), "normal")]
)
def test_the_intervals_of_shrunk_thresholds_cover_the_pass_rates_of_most_classes(
    num_samples, tails
):
    world = World(num_samples, tails=tails)
    promises = world.promises()
    for column, recall in enumerate(promises.recalls):
        shrunk = is_kind(promises, column, "shrunk")
        assert shrunk.sum() > 800
        pass_rates = world.pass_rates(promises.thresholds[:, column])[shrunk]
        assert pass_rates.mean() == pytest.approx(recall, abs=0.4 * (1 - recall))
        estimate, low, high = promises.pass_rates[shrunk, column].T
        assert estimate.mean() == pytest.approx(recall, abs=0.02 * (1 - recall) + 1e-3)
        covered = ((pass_rates >= low) & (pass_rates <= high)).mean()
        assert 0.87 < covered < 0.999


def test_shrinking_towards_similar_classes_makes_pass_rates_more_equal():
    world = World((3, 6))
    spreads = []
    for groups in (world.groups, np.zeros_like(world.groups)):
        promises = promises_of(world.scores, world.labels, groups, (0.9,), 0.9)
        assert is_kind(promises, 0, "shrunk").all()
        spreads.append(world.pass_rates(promises.thresholds[:, 0]).std())
    pooled = world.pass_rates(np.full(len(world.groups), promises.pooled[0])).std()
    assert spreads[0] < 0.98 * spreads[1] < 0.8 * pooled


def test_with_few_classes_all_thresholds_without_a_guarantee_are_pooled():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), [30, *[8] * 19])
    scores = rng.normal(size=20)[labels] + rng.normal(size=len(labels))
    promises = promises_of(scores, labels, np.zeros(20, np.int64), (0.9,), 0.9)
    assert promises.kinds[:, 0].tolist() == [KINDS.index("guaranteed")] + [0] * 19
    passed = np.bincount(labels[scores >= promises.pooled[0]], minlength=20)
    for j in range(1, 20):
        exact = stats.binomtest(int(passed[j]), 8).proportion_ci(0.9, "exact")
        assert promises.pass_rates[j, 0].tolist() == pytest.approx(
            [passed[j] / 8, exact.low, exact.high], abs=1e-6
        )
    num = np.bincount(labels)
    assert promises.below_pooled[0] == (passed < np.ceil(0.9 * num - 1e-9)).mean()
    assert (scores >= promises.pooled[0]).mean() >= 0.9


def test_a_class_without_samples_and_similar_classes_uses_the_pooled_threshold():
    world = World((2, 8))
    groups = np.append(world.groups, [5, world.groups.max() + 1])  # two classes without samples
    promises = promises_of(world.scores, world.labels, groups, (0.9,), 0.9)
    assert promises.kinds[-2:, 0].tolist() == [KINDS.index("shrunk"), KINDS.index("pooled")]
    assert promises.thresholds[-1, 0] == promises.pooled[0]
    # The interval of the pooled threshold covers the pass rate of a random class.
    pass_rates = world.pass_rates(np.full(len(world.centers), promises.pooled[0]))
    _, low, high = promises.pass_rates[-1, 0]
    covered = ((pass_rates >= low) & (pass_rates <= high)).mean()
    assert 0.85 < covered < 0.97


def test_promises_do_not_depend_on_the_order_of_the_samples():
    world = World((0, 40))
    order = np.random.default_rng(1).permutation(len(world.labels))
    again = promises_of(world.scores[order], world.labels[order], world.groups, (0.9, 0.99), 0.9)
    for name, value in asdict(world.promises()).items():
        np.testing.assert_array_equal(getattr(again, name), value, err_msg=name)


@pytest.mark.parametrize("scores", [[1.0], [0.0, 0.0], [3.0, 3.0, -1.0]])
def test_thresholds_of_tiny_sets_are_finite_and_reached(scores):
    labels = np.arange(len(scores)) % 2
    promises = promises_of(np.array(scores), labels, np.zeros(3, np.int64), (0.5, 1.0), 0.9)
    assert np.isfinite(promises.thresholds).all()
    assert (min(scores) >= promises.thresholds[:, 1]).all()


def test_classes_of_a_tree_are_grouped_by_the_lowest_subtree_with_enough_classes():
    tree = label_tree("vtree", 40)
    groups = groups_of_tree(tree)
    assert sorted(set(groups)) == list(range(groups.max() + 1))
    for j in range(40):
        path = [*tree.ancestors(int(tree.node_of_class[j])), int(tree.node_of_class[j])]
        large = [node for node in path if tree.num_classes_below()[node] >= 8]
        lowest = large[-1] if large else path[0]
        below = [k for k in range(40) if lowest in [*tree.ancestors(int(tree.node_of_class[k]))]]
        assert {k for k in range(40) if groups[k] == groups[j]} <= {*below, j}


def test_classes_are_grouped_by_the_direction_of_their_rows():
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(2, 16, generator=generator)
    of_center = torch.randint(2, (96,), generator=generator)
    scales = torch.rand(96, 1, generator=generator) + 0.1
    noise = 0.01 * torch.randn(96, 16, generator=generator)
    rows = scales * (centers[of_center] + noise)

    def blocks():
        order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
        for ids in order.split(7):
            yield ClassRows(ids, rows[ids])

    groups = groups_of_rows(blocks, 96, 16)
    assert groups.max() < 3
    assert all(len(set(of_center[groups == each].tolist())) == 1 for each in set(groups))


def groups_on(class_ranks: int | None) -> np.ndarray:
    head = ClassHead(8, 150, CrossEntropy(), mesh=rank_world(class_ranks).mesh, init_std=1.0)
    return groups_of_head(head)


def test_every_rank_finds_the_groups_of_a_single_process():
    expected = groups_on(None)
    assert len(set(expected)) == 4  # 150 classes // 32
    for found in run_on_ranks(2, groups_on, 2):
        np.testing.assert_array_equal(found, expected)
