"""Sharded heads with label sets match their float64 definitions on one to four ranks.

A group of four processes computes all cases, as in `test_sharded.py`.
"""

import math
import warnings
from itertools import cycle, product
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from heads import BinaryCrossEntropy, ClassHead, CrossEntropy, LabelSets
from tests.heads.cases import LOGIT_MAPS, WEIGHTINGS, label_tree, problem, set_nodes
from tests.heads.set_cases import SET_KINDS, expected_with_sets, label_sets, make_set_head
from tests.heads.test_logits import DIM, EXACT, step
from tests.heads.test_sharded import MESHES
from tests.ranks import rank_mesh, run_on_ranks


class Case(NamedTuple):
    mesh: str
    logits: str
    kind: str
    weighting: str
    num_classes: int = 9
    num_rows: int = 11
    in_blocks: bool = False
    knows_counts: bool = False


def covering_cases() -> list[Case]:
    _, *others, largest = MESHES
    maps, kinds = cycle(LOGIT_MAPS), cycle(SET_KINDS)
    return [
        *(Case(largest, next(maps), kind, by) for kind in SET_KINDS for by in WEIGHTINGS),
        *(Case(largest, name, next(kinds), "dense") for name in LOGIT_MAPS),
        *(Case(mesh, next(maps), kind, "vtree") for mesh in others for kind in SET_KINDS),
        *(
            Case(mesh, next(maps), kind, "utree", knows_counts=True)
            for mesh in ("2x2", "4x1")
            for kind in SET_KINDS
        ),
        # Two of four ranks have no rows, and a third rank has a row without labels.
        *(Case("2x2", "dot", kind, "dense", 13, 2) for kind in SET_KINDS),
        *(Case("4x1", "dot", kind, "dense", 13, 2) for kind in SET_KINDS),
        # Two of three ranks have no classes.
        *(Case("1x3", "dot", kind, "dense", 1) for kind in SET_KINDS),
        *(Case("1x2", "dot", kind, by, 150, in_blocks=True)
          for kind, by in zip(SET_KINDS, cycle(WEIGHTINGS))),
    ]  # fmt: skip


def answers_of_a_rank(cases: list[tuple]) -> dict[tuple, tuple]:
    """This rank's loss, gradients and squared norm, and the ranges of rows and nodes they cover."""
    rank = dist.get_rank()
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
        head = make_set_head(
            case.logits, case.kind, case.weighting, case.num_classes, meshes[case.mesh]
        )
        if case.in_blocks:
            object.__setattr__(head.engine, "memory_bytes", 1)
        features, _, nodes = problem(head.tree, case.num_rows, DIM)
        set_nodes(head, nodes)
        rows = label_sets(case.num_classes, case.num_rows)
        parts = [
            slice(case.num_rows * each // world, case.num_rows * (each + 1) // world)
            for each in range(world)
        ]
        known = {}
        if case.knows_counts:
            known["rows_of_ranks"] = [len(rows[part]) for part in parts]
            known["labels_of_ranks"] = [sum(map(len, rows[part])) for part in parts]
        held = slice(head.engine.weights.start, head.engine.weights.stop)
        mine = parts[rank]
        answers = step(head, features[mine], LabelSets.of(rows[mine]), **known)
        found[key] = answers, float(head.squared_gradient_norm()), mine, held
    return found


def check(cases: list[Case]) -> None:
    for answers in run_on_ranks(4, answers_of_a_rank, cases):
        for case, (found, squared_norm, mine, held) in answers.items():
            tree = label_tree(case.weighting, case.num_classes)
            expected = expected_with_sets(case.logits, case.kind, tree, case.num_rows)
            loss, by_features, by_nodes, *by_scalars = expected
            norm = sum(np.square(each).sum() for each in (by_nodes, *by_scalars))
            expectation = loss, by_features[mine], by_nodes[held], *by_scalars, norm
            for got, want in zip([*found, squared_norm], expectation, strict=True):
                np.testing.assert_allclose(got, want, **EXACT, err_msg=str(case))


def test_a_sharded_head_equals_the_definition():
    check(covering_cases())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_sharded_combination_equals_the_definition(mesh):
    check([Case(*each) for each in product([mesh], LOGIT_MAPS, SET_KINDS, WEIGHTINGS)])


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def errors_on_ranks() -> dict[str, str]:
    """The last rank passes other sets than the rest, for each name."""
    mesh = rank_mesh(2)
    sets = LabelSets.of([[0, 2], []])
    wrong = {
        "one label per row": torch.tensor([0, 1]),
        "invalid sets": LabelSets(torch.tensor([2, 0]), sets.offsets),
        "labels outside": LabelSets(torch.tensor([0, 7]), sets.offsets),
    }
    found = {}
    for name, labels in [*wrong.items(), ("nothing", sets)]:
        head = ClassHead(3, 5, BinaryCrossEntropy(), mesh=mesh)
        try:
            head(torch.zeros(2, 3), labels if is_last() else sets).backward()
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    return found


def test_other_labels_on_one_rank_raise_an_error_on_every_rank():
    for found in run_on_ranks(4, errors_on_ranks):
        assert "differ in their labels (" in found["one label per row"]
        assert "inputs are invalid on 1 of 4 ranks" in found["invalid sets"]
        assert "labels are outside 0..4 (1 in the global batch" in found["labels outside"]
        assert found["nothing"] == ""


def steps_with_a_wrong_count() -> list[tuple[float, list[str]]]:
    """For each set of labels of the last rank, the loss and the warnings; four labels are listed.
    The last step is valid."""
    head = ClassHead(3, 4, CrossEntropy(), mesh=rank_mesh(2))
    found = []
    for sets in ([[0, 1]] * 3, [[0, 1]], [[0, 1], []], [], [[0, 1], [2, 3]]):
        mine = LabelSets.of(sets if is_last() else [[0, 1], [2, 3]])
        features = torch.ones(len(mine), 3, requires_grad=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = head(features, mine, rows_of_ranks=[2] * 4, labels_of_ranks=[4] * 4)
        loss.backward()
        found.append((loss.item(), [str(each.message) for each in caught]))
    return found


def test_a_wrong_number_of_labels_on_one_rank_makes_the_loss_nan_on_every_rank():
    *others, last = run_on_ranks(4, steps_with_a_wrong_count)
    for *wrong, (valid, _) in (*others, last):
        assert all(math.isnan(loss) for loss, _ in wrong)
        assert valid == pytest.approx(math.log(4), abs=0.1)
    for loss_and_warnings in last[:-1]:
        (message,) = loss_and_warnings[1]
        assert "labels_of_ranks lists 4 labels for this rank" in message
    assert not any(caught for rank in others for _, caught in rank)


def error_without_counts() -> str:
    head = ClassHead(3, 4, CrossEntropy(), mesh=rank_mesh())
    with pytest.raises(ValueError, match="labels_of_ranks has 0 numbers") as caught:
        head(torch.ones(1, 3), LabelSets.of([[0]]), rows_of_ranks=[1, 1])
    return str(caught.value)


def test_several_ranks_need_the_number_of_labels_of_each():
    assert all(
        "pass one number per rank" in error for error in run_on_ranks(2, error_without_counts)
    )
