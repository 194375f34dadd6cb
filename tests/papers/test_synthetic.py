"""The synthetic experiments of paper 000 at toy size, and their parts."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from experiments.papers.experiment import Experiment
from experiments.papers.experiments import tree_base, tree_metric, tree_norms, tree_regimes
from experiments.papers.experiments.synthetic import (
    Arm,
    Regime,
    chained_vtree,
    draw,
    head_of,
    is_cross_entropy,
    is_flat,
    train_head,
)
from experiments.papers.experiments.trained import NAMES, Trained
from experiments.papers.experiments.tree_norms import least_norm
from experiments.papers.section import Section
from heads.tree import LabelTree, build_cover_tree

Conducted = Callable[[Experiment], Section]


@pytest.mark.slow
def test_regimes_compare_the_tree_with_every_loss(conducted: Conducted) -> None:
    section = conducted(tree_regimes.EXPERIMENT)
    accuracies, advantages = section.tables
    assert [row[0] for row in accuracies.rows] == ["3, 8, 5, 1", "5, 8, 5, 1", "3, 8, 4, 1"]
    assert accuracies.header[1:] == [*NAMES.values(), "Bayes"]
    assert [row[0] for row in advantages.rows[3:]] == ["all, V-tree", "all, V-tree with chains"]
    assert len(section.claims) == 5


def test_norms_are_compared_at_the_optimum_and_after_training(conducted: Conducted) -> None:
    section = conducted(tree_norms.EXPERIMENT)
    exact, trained, line = section.tables
    assert [row[0] for row in exact.rows] == ["4", "8", "16", "exponent of k"]
    assert [row[0] for row in trained.rows] == ["4", "8", "exponent of k"]
    assert line.rows[0] == ["2", "2.24", "0.71"]  # root of 1 + 2^2, root of 1/2
    assert section.claims[-1].verdict == "does not hold"  # Lemma 3 at k = 2


@pytest.mark.slow
def test_each_base_and_metric_has_a_row(conducted: Conducted) -> None:
    base = conducted(tree_base.EXPERIMENT)
    rows = [row[0] for row in base.tables[0].rows]
    assert rows == [
        *("cross entropy", "SimLoss", "hierarchical softmax"),
        *("V-tree, base 1.1", "V-tree, base 1.3"),
        *("V-tree with chains, base 1.1", "V-tree with chains, base 1.3"),
        "Bayes",
    ]
    metric = conducted(tree_metric.EXPERIMENT)
    assert [row[0] for row in metric.tables[0].rows] == ["0", "1"]
    assert "epsilon = 1" in metric.claims[0].statement
    assert [claim.verdict for claim in metric.claims] != ["degenerate"] * 2
    assert "The paper's regime is n = 100, d = 64, k = 10" in metric.remarks[0]


def test_a_draw_has_the_same_w_and_test_set_for_every_n_and_epsilon() -> None:
    one = draw(Regime(n=5, d=3, k=4, tests=20), 7)
    other = draw(Regime(n=9, d=3, k=4, tests=20, epsilon=1.0), 7)
    np.testing.assert_array_equal(one.true, other.true)
    np.testing.assert_array_equal(one.test_features, other.test_features)
    np.testing.assert_array_equal(one.label_vectors, one.true.astype(np.float32))
    assert abs(np.corrcoef(one.true.ravel(), other.label_vectors.ravel())[0, 1]) < 0.9


def test_training_is_one_pass_of_averaged_sgd(tmp_path: Path) -> None:
    drawn = draw(Regime(n=6, d=3, k=4, tests=50), 0)
    found = train_head(head_of(Arm("ce"), drawn, tmp_path / "none"), drawn, rate=0.1)
    weights = np.zeros((4, 3))
    before = []
    for x, y in zip(drawn.features, drawn.labels, strict=True):
        before.append(weights.copy())
        p = np.exp(weights @ x)
        weights -= 0.1 * np.outer(p / p.sum() - np.eye(4)[y], x)
    assert found["last_norm"] == pytest.approx(np.linalg.norm(weights), rel=1e-5)
    assert found["averaged_norm"] == pytest.approx(np.linalg.norm(np.mean(before, 0)), rel=1e-5)
    predicted = (drawn.test_features @ weights.T).argmax(1)
    assert found["last"] == pytest.approx((predicted == drawn.test_labels).mean())


@pytest.mark.parametrize("loss", ["vtree", "hierarchical_softmax"])
def test_an_arm_with_a_flat_label_tree_equals_cross_entropy(loss: str, tmp_path: Path) -> None:
    drawn = draw(Regime(n=30, d=6, k=8, tests=200), 0)
    dense = train_head(head_of(Arm("ce"), drawn, tmp_path / "none"), drawn, 0.1)
    for base, same in ((100.0, True), (1.3, False)):
        arm = Arm(loss, base)
        assert is_cross_entropy(arm, drawn.label_vectors) == same
        found = train_head(head_of(arm, drawn, tmp_path / "tree"), drawn, 0.1)
        assert (found["last"] == dense["last"]) == same
    assert is_cross_entropy(Arm("ce"), drawn.label_vectors)
    for other in ("simloss", "utree", "vtree_chains"):
        assert not is_cross_entropy(Arm(other, 100.0), drawn.label_vectors)


def test_chains_have_one_pseudoclass_per_level() -> None:
    vectors = np.random.default_rng(0).normal(size=(12, 3))
    cover = build_cover_tree(vectors, metric="euclidean")
    chained, compressed = chained_vtree(cover), cover.vtree()
    assert not is_flat(compressed)
    assert is_flat(LabelTree.dense(12))
    num_levels = int(cover.level.max()) + 1
    assert chained.num_nodes == 12 + int((num_levels - cover.level).sum())
    assert set(chained.depth[chained.node_of_class].tolist()) == {num_levels}

    def groups(tree: LabelTree) -> set[frozenset[int]]:
        below = {
            node: frozenset(
                i for i, at in enumerate(tree.node_of_class) if node in {*tree.ancestors(at), at}
            )
            for node in range(tree.num_nodes)
        }
        return {classes for classes in below.values() if len(classes) > 1}

    assert groups(chained) == groups(compressed)


def of_draw(accuracies: dict[str, float]) -> dict[str, object]:
    """Return a draw with a single arm, given its accuracy at each rate."""
    runs = {rate: {"averaged": at, "last": at} for rate, at in accuracies.items()}
    return {"bayes": 1.0, "arms": [{"nodes": 3, "depth": 1.0, "runs": runs}]}


def test_rates_are_chosen_on_separate_draws() -> None:
    arm = Arm("ce")
    trained = Trained(Regime(), [arm], (0.1, 0.5))
    trained.searched = [of_draw({"0.1": 0.9, "0.5": 0.1}), of_draw({"0.1": 0.2, "0.5": 0.3})]
    trained.draws = [of_draw({"0.1": 0.2, "0.5": 0.7})]
    assert trained.own_rate(arm) == 0.1
    assert trained.at_own(arm) == [0.2]
    assert trained.at(arm, 0.5) == [0.7]
    (settings,) = trained.job(7).settings["arms"]
    assert settings["rates"] == [0.01, 0.1]


def test_the_least_norm_stores_the_common_part_of_classes_in_their_parent() -> None:
    tree = LabelTree.from_parents([2, 2, -1], [0, 1, -1])
    rows = np.array([[3.0], [3.0]])
    # Root r and leaves 3 - r: r^2 + 2 (3 - r)^2 has its minimum 6 at r = 2.
    assert least_norm(tree, rows) == pytest.approx(6**0.5)
    assert least_norm(LabelTree.dense(2), rows) == pytest.approx(18**0.5)
