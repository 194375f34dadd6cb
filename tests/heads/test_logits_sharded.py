"""Logit maps, losses and class weights match their float64 definitions on one to four ranks.

A group of four processes computes all cases. Smaller meshes use only the first processes. The
default suite runs a covering subset: every loss with every map on four ranks, and every map with
every weighting on every other mesh. With nine classes on four ranks, one rank of a dense head has
no classes.
"""

from functools import cache
from itertools import cycle, product

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.heads.cases import LOGIT_MAPS, LOSS_KINDS, WEIGHTINGS, label_tree, problem, set_nodes
from tests.heads.test_logits import DIM, EXACT, ROWS, expected, make_head, step
from tests.ranks import run_on_ranks

NUM_CLASSES = 9
# Ranks by position on the axes data x class.
MESHES = {
    "1": [[0]],
    "1x2": [[0, 1]],
    "1x3": [[0, 1, 2]],
    "2x2": [[0, 1], [2, 3]],
    "4x1": [[0], [1], [2], [3]],
    "1x4": [[0, 1, 2, 3]],
}
Case = tuple[str, str, str, str]  # mesh, logit map, loss, weighting


def covering_cases() -> list[Case]:
    *others, largest = MESHES
    pairs = zip(product(LOGIT_MAPS, LOSS_KINDS), cycle(WEIGHTINGS))
    triples = zip(product(others, LOGIT_MAPS, WEIGHTINGS), cycle(LOSS_KINDS))
    return [
        *((largest, name, kind, weighting) for (name, kind), weighting in pairs),
        *((mesh, name, kind, weighting) for (mesh, name, weighting), kind in triples),
    ]


def answers_of_a_rank(cases: list[Case]) -> dict[Case, tuple]:
    """This rank's loss, gradients and squared norm, and the ranges of rows and nodes they cover."""
    rank = torch.distributed.get_rank()
    meshes = {
        shape: DeviceMesh("cpu", ranks, mesh_dim_names=("data", "class"))
        for shape, ranks in MESHES.items()
    }
    found = {}
    for case in cases:
        shape, name, kind, weighting = case
        world = meshes[shape].size()
        if rank >= world:
            continue
        head = make_head(name, kind, weighting, NUM_CLASSES, meshes[shape])
        features, labels, nodes = problem(head.tree, ROWS, DIM)
        set_nodes(head, nodes)
        mine = slice(ROWS * rank // world, ROWS * (rank + 1) // world)
        held = slice(head.engine.weights.start, head.engine.weights.stop)
        answers = step(head, features[mine], labels[mine])
        found[case] = answers, float(head.squared_gradient_norm()), mine, held
    return found


@cache
def definition_of(name: str, kind: str, weighting: str) -> list[np.ndarray]:
    return expected(name, kind, label_tree(weighting, NUM_CLASSES))


def check(cases: list[Case]) -> None:
    for answers in run_on_ranks(4, answers_of_a_rank, cases):
        for case, (found, squared_norm, mine, held) in answers.items():
            loss, by_features, by_nodes, *by_scalars = definition_of(*case[1:])
            norm = sum(np.square(each).sum() for each in (by_nodes, *by_scalars))
            expectation = loss, by_features[mine], by_nodes[held], *by_scalars, norm
            for got, want in zip([*found, squared_norm], expectation, strict=True):
                np.testing.assert_allclose(got, want, **EXACT, err_msg=str(case))


def test_a_sharded_head_equals_the_definition():
    check(covering_cases())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_sharded_combination_equals_the_definition(mesh):
    check(list(product([mesh], LOGIT_MAPS, LOSS_KINDS, WEIGHTINGS)))
