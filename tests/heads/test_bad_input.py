"""Invalid input raises a clear error on every rank instead of a hang.

Errors of a single module are tested with that module.
"""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heads import ClassHead, Cosine, Dot, LabelTree, build_head
from heads.append import append_classes
from heads.config import HeadConfig, VTreeConfig
from heads.hierarchical import HierarchicalSoftmaxHead
from heads.losses import (
    BinaryCrossEntropy,
    ClassFacts,
    CrossEntropy,
    NoiseContrastiveEstimation,
    SimLoss,
    SmoothTopK,
    TopKHinge,
)
from tests.heads.cases import LOSS_KINDS, label_tree, make_loss
from tests.ranks import rank_mesh, run_on_ranks

EVERY_KIND = (*LOSS_KINDS, "hierarchical_softmax")


def make_head(kind: str, tree: LabelTree, mesh: Any = None) -> ClassHead:
    if kind == "hierarchical_softmax":
        return HierarchicalSoftmaxHead(3, tree, mesh=mesh, init_std=0.1)
    return ClassHead(3, tree, make_loss(kind, tree.num_classes), mesh=mesh, init_std=0.1)


def error_of_step(head: ClassHead, features: Tensor, labels: Tensor) -> str:
    """The error of a step on this rank, or "no error"."""
    try:
        head(features, labels).backward()
    except (ValueError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def is_last() -> bool:
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


# ---- labels and features ------------------------------------------------------------------------

OUTSIDE = (-1, 13, 2**40)


def labels_outside(mesh: Any, *, here: bool) -> list[str]:
    """For each label in OUTSIDE, the error of a step with that label on this rank or on none."""
    head = make_head("batch_ce", label_tree("vtree", 13), mesh)
    return [
        error_of_step(head, torch.zeros(3, 3), torch.tensor([0, wrong if here else 12, 5]))
        for wrong in OUTSIDE
    ]


def labels_outside_on_the_last_rank() -> list[str]:
    return labels_outside(rank_mesh(2), here=is_last())


def test_a_label_outside_the_classes_raises_an_error_on_every_rank():
    *others, last = run_on_ranks(4, labels_outside_on_the_last_rank)
    alone = labels_outside(None, here=True)
    for errors, num_here in [(alone, 1), (last, 1), *((other, 0) for other in others)]:
        expected = f"outside 0..12 (1 in the global batch, {num_here} on this rank)"
        assert all(expected in error and "\n" not in error for error in errors)


BROKEN = {
    "narrow features": lambda x, y: (x[:, :2], y),
    "flat features": lambda x, y: (x[0], y),
    "deep features": lambda x, y: (x[None], y),
    "features of integers": lambda x, y: (x.long(), y),
    "one label": lambda x, y: (x, y[0]),
    "labels of floats": lambda x, y: (x, y.float()),
    "more labels": lambda x, y: (x, torch.cat([y, y])),
    "another device": lambda x, y: (x.to("meta"), y),
    "labels elsewhere": lambda x, y: (x, y.to("meta")),
}


def broken_rows() -> dict[str, list[str]]:
    """The error of a step for each kind of invalid rows on the last rank, then of a valid step."""
    found = {}
    for kind in ("ce", "hierarchical_softmax"):
        head = make_head(kind, label_tree("vtree", 13), rank_mesh())
        rows = torch.zeros(2, 3), torch.tensor([0, 1])
        broken = [how(*rows) if is_last() else rows for how in BROKEN.values()]
        found[kind] = [error_of_step(head, *each) for each in [*broken, rows]]
    return found


def test_invalid_rows_raise_an_error_on_every_rank_and_the_next_step_succeeds():
    for found in run_on_ranks(3, broken_rows):
        for *errors, valid in found.values():
            assert len(errors) == len(BROKEN)
            for error in errors:
                assert "on 1 of 3 ranks" in error
                assert "pass features as a float tensor [b, 3]" in error
                assert "\n" not in error
            assert valid == "no error"


# ---- NaN ----------------------------------------------------------------------------------------


def nan_features(kind: str) -> str:
    """One row of the first rank is NaN."""
    head = make_head(kind, label_tree("vtree", 13), rank_mesh())
    features = torch.ones(3, 3)
    if torch.distributed.get_rank() == 0:
        features[1, 2] = torch.nan
    return error_of_step(head, features, torch.tensor([0, 1, 2]))


def nan_weight(kind: str, class_id: int) -> str:
    """The vector of one class is NaN on the rank that stores it."""
    head = make_head(kind, label_tree("vtree", 13), rank_mesh())
    tree = head.label_tree if isinstance(head, HierarchicalSoftmaxHead) else head.tree
    weights, node = head.engine.weights, int(tree.node_of_class[class_id])
    if weights.start <= node < weights.stop:
        with torch.no_grad():
            head.weight[node - weights.start] = torch.nan
    return error_of_step(head, torch.ones(3, 3), torch.tensor([0, 1, 2]))


def all_nan() -> list[tuple[str, list[str]]]:
    """Class 1 has a row in the batch, and class 7 does not. Hierarchical softmax does not compute
    the latter."""
    return [
        (
            nan_features(kind),
            [nan_weight(kind, each) for each in ((1,) if kind == EVERY_KIND[-1] else (1, 7))],
        )
        for kind in EVERY_KIND
    ]


def test_nan_on_one_rank_raises_an_error_that_names_that_rank_on_every_rank():
    first, second = run_on_ranks(2, all_nan)
    assert first == second
    for of_features, of_vectors in first:
        assert of_features.startswith("FloatingPointError: the loss is NaN; on rank 0, 1 of 3 rows")
        assert "rows of features (row 1) and 0 of" in of_features
        assert of_features.count("on rank") == 1
        for of_vector in of_vectors:
            # The rank depends on the sharding.
            assert of_vector.count("on rank") == 1
            assert ", 0 of 3 rows of features and 1 of" in of_vector


def test_logits_that_overflow_to_nan_raise_an_error():
    """All inputs are finite, but their product is inf - inf."""
    head = make_head("ce", LabelTree.dense(4))
    with torch.no_grad():
        head.weight.fill_(1e38)
    error = error_of_step(head, torch.tensor([[1e38, -1e38, 0.0]]), torch.tensor([0]))
    assert error.startswith("FloatingPointError: the loss is NaN; features and weight vectors are")


# ---- hyperparameters and constants that do not fit the classes ----------------------------------

RECIPES = [
    (HeadConfig(loss=SmoothTopK(k=5)), 5, "head.loss.k is 5, but there are only 5 classes: lower"),
    (HeadConfig(loss=TopKHinge(k=5)), 5, "head.loss.k is 5, but there are only 5 classes: lower"),
    (HeadConfig(weights=VTreeConfig()), 6, "there are 6 label vectors, but 5 classes"),
    (HeadConfig(loss=SimLoss()), 6, r"simloss: label_vectors have shape \[6, 4\], but there are"),
]


@pytest.mark.parametrize(("config", "num_vectors", "message"), RECIPES)
def test_a_recipe_that_does_not_match_the_classes_raises_an_error(config, num_vectors, message):
    vectors = np.random.default_rng(0).normal(size=(num_vectors, 4))
    options = {"mesh": None, "seed": 0, "device": "cpu"}
    with pytest.raises(ValueError, match=message):
        build_head(config, dim=3, num_classes=5, label_vectors=vectors, **options)


def test_a_head_rejects_a_loss_that_was_prepared_for_other_classes():
    nce = NoiseContrastiveEstimation().prepare(ClassFacts(3, torch.ones(3)))
    with pytest.raises(ValueError, match="nce was prepared for 3 classes, but the head has 4"):
        ClassHead(3, 4, nce)
    simloss = SimLoss().prepare(ClassFacts(5, None, torch.ones(5, 2)))
    with pytest.raises(ValueError, match="simloss was prepared for 5 classes, but the head has 4"):
        ClassHead(3, 4, simloss)


def test_classes_cannot_be_appended_to_a_head_with_per_class_data():
    facts = ClassFacts(4, torch.ones(4), torch.ones(4, 2))
    for loss in (NoiseContrastiveEstimation(), SimLoss()):
        with pytest.raises(ValueError, match="but the head has 5: create a new head"):
            append_classes(ClassHead(3, 4, loss.prepare(facts)), [-1])
    weighted = ClassHead(3, 4, CrossEntropy(), class_weights=torch.ones(4))
    with pytest.raises(ValueError, match="class_weights for 4 classes, but none for new classes"):
        append_classes(weighted, [-1])
    assert weighted.num_classes == 4
    nodes = LabelTree.from_parents([-1] + 12 * [0], [-1, *range(12)])
    with pytest.raises(ValueError, match="prepared for 13 classes, but the head has 14: create a"):
        append_classes(HierarchicalSoftmaxHead(3, nodes), [-1])


# ---- ranks that differ --------------------------------------------------------------------------

TREE = LabelTree.from_parents([-1, 0, 0, 1, 1, 1, 2], [-1, -1, -1, 0, 1, 2, 3])
OTHER_TREE = LabelTree.from_parents([-1, 0, 0, 1, 1, 2, 2], [-1, -1, -1, 0, 1, 2, 3])
# What the last rank does differently, and what the error must name.
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "tree": ({"tree": OTHER_TREE}, "label trees"),
    "loss": ({"loss": BinaryCrossEntropy()}, "losses"),
    "option of the loss": ({"loss": CrossEntropy(label_smoothing=0.1)}, "losses"),
    "logit map": ({"logits": Cosine(scale=3)}, "logit maps"),
    "option of the logit map": ({"logits": Dot(scale=3)}, "logit maps"),
    "class weights": ({"class_weights": torch.tensor([1.0, 1, 1, 2])}, "class weights"),
    "bias": ({"bias": False}, "parameters"),
    "dim": ({"dim": 5}, "parameters"),
    "dtype of the rows": ({"dtype": torch.bfloat16}, "parameters"),
    "seed": ({"seed": 7}, "mode and draw"),
    "draw": ({"draw": 3}, "mode and draw"),
    "evaluation mode": ({"training": False}, "mode and draw"),
    "autocast": ({"autocast": torch.bfloat16}, "dtype of features"),
    "dtype of features": ({"features": torch.float64}, "dtype of features"),
    "row weights": ({"row_weights": True}, "row weights"),
    "frozen head": ({"learns": False}, "required gradients"),
    "list of labels": ({"labels": [0, 1]}, "inputs are invalid"),
    "no labels": ({"labels": None}, "inputs are invalid"),
    "NumPy features": ({"features": np.zeros((2, 3), np.float32)}, "inputs are invalid"),
    "list of row weights": ({"row_weights": [1.0, 1.0]}, "inputs are invalid"),
}


def error_of_a_difference(changes: dict[str, Any], mesh: Any) -> str:
    """The error of a step of a head with these changes."""
    changes = dict(changes)
    features, labels = changes.pop("features", None), changes.pop("labels", torch.tensor([0, 1]))
    dim, weighted = changes.pop("dim", 3), changes.pop("row_weights", None)
    draw, training = changes.pop("draw", 0), changes.pop("training", True)
    autocast, learns = changes.pop("autocast", None), changes.pop("learns", True)
    loss, tree = changes.pop("loss", CrossEntropy()), changes.pop("tree", TREE)
    head = ClassHead(dim, tree, loss, mesh=mesh, **{"class_weights": torch.ones(4), **changes})
    head.train(training).requires_grad_(learns)
    head.draw = draw
    if features is None or isinstance(features, torch.dtype):
        features = torch.zeros(2, dim, dtype=features)
    row_weights = torch.ones(2) if weighted is True else weighted
    try:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            head(features, labels, row_weights).backward()
    except ValueError as error:
        return str(error)
    return "no error"


def errors_if_the_last_rank_differs() -> dict[str, str]:
    mesh = rank_mesh(2)
    return {
        name: error_of_a_difference(changes if is_last() else {}, mesh)
        for name, (changes, _) in DIFFERENCES.items()
    }


def test_a_rank_that_differs_raises_an_error_on_every_rank():
    for errors in run_on_ranks(4, errors_if_the_last_rank_differs):
        for name, (_, named) in DIFFERENCES.items():
            assert named in errors[name], (name, errors[name])
            assert "\n" not in errors[name]


def steps_with_a_wrong_count() -> list[tuple[float, bool, list[str]]]:
    """For each wrong number of features and labels on the last rank, the loss, whether the gradient
    of the features is NaN, and the warnings. The last step is valid."""
    head = ClassHead(3, 4, CrossEntropy(), mesh=rank_mesh(2))
    found = []
    for num_features, num_labels in ((3, 3), (1, 1), (2, 3), (0, 0), (2, 2)):
        if not is_last():
            num_features = num_labels = 2
        features = torch.ones(num_features, 3, requires_grad=True)
        labels = torch.ones(num_labels, dtype=torch.int64)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = head(features, labels, rows_of_ranks=[2] * 4)
        loss.backward()
        is_nan = bool(features.grad.isnan().any())
        found.append((loss.item(), is_nan, [str(each.message) for each in caught]))
    return found


def test_a_wrong_row_count_on_one_rank_makes_the_loss_nan_on_every_rank():
    *others, last = run_on_ranks(4, steps_with_a_wrong_count)
    for *wrong, (valid, is_nan, _) in (*others, last):
        assert all(math.isnan(loss) for loss, _, _ in wrong)
        assert valid == pytest.approx(math.log(4), abs=0.1)
        assert not is_nan
    for _, _, caught in last[:-1]:
        assert [each.count("rows_of_ranks lists 2 rows for this rank") for each in caught] == [1]
    assert not any(caught for rank in others for _, _, caught in rank)


def too_few_rows() -> tuple[str, str]:
    """The errors of a batch without rows, and of a single row for a batch loss."""
    nothing = torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)
    empty = error_of_step(make_head("ce", LabelTree.dense(2), rank_mesh()), *nothing)
    rows = slice(0, torch.distributed.get_rank() == 0)
    head = make_head("batch_max_margin", LabelTree.dense(2), rank_mesh())
    features, labels = torch.zeros(1, 3)[rows], torch.zeros(1, dtype=torch.int64)[rows]
    return empty, error_of_step(head, features, labels)


def test_too_few_rows_in_the_global_batch_raise_an_error_on_every_rank():
    for empty, single in run_on_ranks(3, too_few_rows):
        assert empty.startswith("ValueError: the global batch has no rows")
        assert single.startswith("ValueError: batch_max_margin needs a global batch of at least 2")
