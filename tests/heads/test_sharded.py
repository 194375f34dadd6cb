"""Sharded heads match their float64 definitions on one to four ranks.

A group of four processes computes all cases. Smaller meshes use only the first processes. The
default suite runs a covering subset: every loss, and every map with every weighting, on four ranks,
and every map on every other mesh. With nine classes on four ranks, one rank of a dense head has no
classes.
"""

from functools import cache
from itertools import cycle, pairwise, product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from heads import LabelSets
from tests.heads.cases import LOGIT_MAPS, LOSS_KINDS, WEIGHTINGS, label_tree, problem, set_nodes
from tests.heads.set_cases import (
    expected_with_sets,
    label_sets,
    make_set_head,
    tensors_of_weights,
    weights_of,
)
from tests.heads.test_logits import DIM, EXACT, expected, make_head, step
from tests.ranks import rank_mesh, run_on_ranks

# Ranks by position on the axes data x class.
MESHES = {
    "1": [[0]],
    "1x2": [[0, 1]],
    "1x3": [[0, 1, 2]],
    "2x2": [[0, 1], [2, 3]],
    "4x1": [[0], [1], [2], [3]],
    "1x4": [[0, 1, 2, 3]],
}


class Case(NamedTuple):
    mesh: str
    logits: str
    kind: str
    weighting: str
    num_classes: int = 9
    num_rows: int = 11
    in_blocks: bool = False
    of_sets: bool = False
    knows_counts: bool = False
    is_weighted: bool = False


def covering_cases() -> list[Case]:
    _, *others, largest = MESHES
    weighted = list(zip(LOSS_KINDS, cycle(WEIGHTINGS)))
    maps = cycle(LOGIT_MAPS)
    kinds = cycle(LOSS_KINDS)
    return [
        *(Case(largest, next(maps), kind, "dense") for kind in LOSS_KINDS),
        *(Case(largest, name, next(kinds), by) for name, by in product(LOGIT_MAPS, WEIGHTINGS)),
        *(
            Case(mesh, name, next(kinds), by)
            for mesh in others
            for name, by in zip(LOGIT_MAPS, cycle(WEIGHTINGS))
        ),
        # Two of four ranks have no rows.
        *(Case(largest, "dot", kind, by, 13, 2) for kind, by in weighted),
        # Two of three ranks have no classes.
        *(Case("1x3", "dot", kind, "dense", 1) for kind in LOSS_KINDS if "topk" not in kind),
        *(Case("1x2", "dot", kind, by, 150, in_blocks=True) for kind, by in weighted),
        *(Case("1x3", "dot", kind, by, knows_counts=True) for kind, by in weighted),
    ]


def answers_of_a_rank(cases: list[tuple]) -> dict[tuple, tuple]:
    """This rank's loss, gradients and squared norm, and the ranges of rows and nodes they cover."""
    rank = torch.distributed.get_rank()
    meshes = {
        shape: DeviceMesh("cpu", ranks, mesh_dim_names=("data", "class"))
        for shape, ranks in MESHES.items()
    }
    found = {}
    for key in cases:
        case = Case(*key)
        world = meshes[case.mesh].size()
        if rank >= world:
            continue
        ends = [case.num_rows * each // world for each in range(world + 1)]
        parts = [slice(*pair) for pair in pairwise(ends)]
        mine, options, of_call = parts[rank], {}, {}
        if case.is_weighted:
            row_weights, options = tensors_of_weights(case.kind)
            of_call["row_weights"] = row_weights[mine]
        make, mesh = make_set_head if case.of_sets else make_head, meshes[case.mesh]
        head = make(case.logits, case.kind, case.weighting, case.num_classes, mesh, **options)
        if case.in_blocks:
            object.__setattr__(head.engine, "memory_bytes", 1)
        features, labels, nodes = problem(head.tree, case.num_rows, DIM)
        set_nodes(head, nodes)
        held = slice(head.engine.weights.start, head.engine.weights.stop)
        if case.of_sets:
            labels = LabelSets.of(label_sets(case.num_classes, case.num_rows))
        if case.knows_counts:
            of_call["rows_of_ranks"] = [part.stop - part.start for part in parts]
        if case.knows_counts and case.of_sets:
            of_call["labels_of_ranks"] = [len(labels[part].labels) for part in parts]
        answers = step(head, features[mine], labels[mine], **of_call)
        found[key] = answers, float(head.squared_gradient_norm()), mine, held
    return found


@cache
def definition_of(case: Case) -> list[np.ndarray]:
    tree = label_tree(case.weighting, case.num_classes)
    if not case.of_sets:
        return expected(case.logits, case.kind, tree, case.num_rows)
    weights = weights_of(case.kind) if case.is_weighted else (None, None)
    return expected_with_sets(case.logits, case.kind, tree, case.num_rows, weights)


def check(cases: list[Case]) -> None:
    for answers in run_on_ranks(4, answers_of_a_rank, cases):
        for case, (found, squared_norm, mine, held) in answers.items():
            loss, by_features, by_nodes, *by_scalars = definition_of(case._replace(mesh=""))
            norm = sum(np.square(each).sum() for each in (by_nodes, *by_scalars))
            expectation = loss, by_features[mine], by_nodes[held], *by_scalars, norm
            for got, want in zip([*found, squared_norm], expectation, strict=True):
                np.testing.assert_allclose(got, want, **EXACT, err_msg=str(case))


def test_a_sharded_head_equals_the_definition():
    check(covering_cases())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_sharded_combination_equals_the_definition(mesh):
    check([Case(*each) for each in product([mesh], LOGIT_MAPS, LOSS_KINDS, WEIGHTINGS)])


def accumulated() -> tuple[np.ndarray, np.ndarray]:
    found = []
    for accumulates in (False, True):
        head = make_head("cosine", "ce", "dense", 13, rank_mesh(2))
        features, labels, nodes = problem(head.tree, 11, DIM)
        set_nodes(head, nodes)
        head.accumulates = accumulates
        head(features, labels).backward()
        head.reduce_gradients()
        scalars = [head.log_scale.grad.item(), head.offset.grad.item()]
        found.append(np.append(head.weight.grad.numpy(), scalars))
    return found[0], found[1]


def test_accumulated_gradients_are_summed_over_data_once():
    """This includes the gradients of the scalars."""
    for got, want in run_on_ranks(2, accumulated):
        np.testing.assert_allclose(got, want, **EXACT)
