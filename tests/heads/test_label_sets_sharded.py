"""Sharded heads with label sets match their float64 definitions on one to four ranks.

A group of four processes computes all cases, as in `test_sharded.py`.
"""

import math
import warnings
from itertools import cycle, product

import pytest
import torch

from heads import BinaryCrossEntropy, ClassHead, CrossEntropy, LabelSets
from tests.heads.cases import LOGIT_MAPS, WEIGHTINGS
from tests.heads.set_cases import SET_KINDS
from tests.heads.test_bad_input import is_last
from tests.heads.test_sharded import MESHES, Case, check
from tests.ranks import rank_mesh, run_on_ranks


def covering_cases() -> list[Case]:
    _, *others, largest = MESHES
    maps, kinds = cycle(LOGIT_MAPS), cycle(SET_KINDS)
    cases = [
        *(Case(largest, next(maps), kind, by) for kind in SET_KINDS for by in WEIGHTINGS),
        *(Case(largest, name, next(kinds), "dense") for name in LOGIT_MAPS),
        *(Case(mesh, next(maps), kind, "vtree") for mesh in others for kind in SET_KINDS),
        *(
            Case(mesh, next(maps), kind, "utree", knows_counts=True)
            for mesh in ("2x2", "4x1")
            for kind in SET_KINDS
        ),
        *(
            Case(mesh, next(maps), kind, "vtree", 13, is_weighted=True)
            for mesh in ("1x3", "2x2")
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
    return [case._replace(of_sets=True) for case in cases]


def test_a_sharded_head_equals_the_definition():
    check(covering_cases())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_sharded_combination_equals_the_definition(mesh):
    cases = product([mesh], LOGIT_MAPS, SET_KINDS, WEIGHTINGS)
    check([Case(*each, of_sets=True) for each in cases])


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
