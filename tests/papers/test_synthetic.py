"""The hierarchies of paper 000 at toy size, and the least norm of a tree."""

from collections.abc import Callable

import numpy as np
import pytest

from experiments.papers.experiment import Experiment
from experiments.papers.experiments import tree_hierarchies
from experiments.papers.experiments.tree_hierarchies import hierarchy_counts
from experiments.papers.experiments.tree_norms import least_norm
from experiments.papers.section import Section
from experiments.papers.tree_simulation import path_counts


def test_the_hierarchies_experiment_runs_at_toy_size(
    conducted: Callable[[Experiment], Section],
) -> None:
    section = conducted(tree_hierarchies.EXPERIMENT)
    assert len(section.claims) == 3
    assert [row[0] for row in section.tables[0].rows] == ["cifar100, 1", "glyphs, 1", "emoji, 1"]


def test_a_class_shares_the_nodes_of_its_path() -> None:
    counts = hierarchy_counts(["a > b", "a > c", ""], [0, 1, 2])
    assert (counts[:, :3] == np.eye(3)).all()
    assert (counts @ counts.T).tolist() == [[3, 1, 0], [1, 3, 0], [0, 0, 1]]


def test_the_least_norm_of_a_tree_is_that_of_the_pseudoinverse() -> None:
    rows = np.random.default_rng(0).normal(size=(6, 3))
    paths = path_counts("vtree", rows, 1.3)
    nodes = np.linalg.pinv(paths) @ rows
    assert least_norm(paths, rows) == pytest.approx(float(np.linalg.norm(nodes)))
