"""Invalid input raises a clear error on every rank instead of a hang.

Errors of a single module are tested with that module: invalid trees in test_label_tree.py and
test_hierarchy.py, invalid files in test_named_tree.py.
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
from tests.heads.cases import (
    LOSS_KINDS,
    WEIGHTINGS,
    gradient_of_nodes,
    label_tree,
    make_loss,
)
from tests.ranks import rank_mesh, run_on_ranks

EVERY_KIND = (*LOSS_KINDS, "hierarchical_softmax")


def class_mesh(world_size: int, data_axis: int = 1):
    if world_size == 1:
        return None
    return rank_mesh(data_axis)


def make_head(kind: str, tree: LabelTree, mesh=None) -> ClassHead:
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


def one_line_on_every_rank(world_size: int, function, *arguments) -> list[str]:
    """The result of each rank, which must be a single line. One rank runs in this process."""
    if world_size == 1:
        answers = [function(1, *arguments)]
    else:
        answers = run_on_ranks(world_size, function, world_size, *arguments)
    assert len(answers) == world_size
    assert not any("\n" in answer for answer in answers)
    return answers


def here(world_size: int) -> int:
    return 0 if world_size == 1 else torch.distributed.get_rank()


# ---- labels -------------------------------------------------------------------------------------


OUTSIDE = (-1, 13, 2**40)


def labels_outside(world_size: int, data_axis: int) -> str:
    """For each label in OUTSIDE, the error of a step with that label on the last rank."""
    head = make_head("batch_ce", label_tree("vtree", 13), class_mesh(world_size, data_axis))
    last = here(world_size) == world_size - 1
    return " | ".join(
        error_of_step(head, torch.zeros(3, 3), torch.tensor([0, wrong if last else 12, 5]))
        for wrong in OUTSIDE
    )


@pytest.mark.parametrize(("world_size", "data_axis"), [(1, 1), (2, 1), (4, 2)])
def test_a_label_outside_the_classes_raises_an_error_on_every_rank(world_size, data_axis):
    *others, last = one_line_on_every_rank(world_size, labels_outside, data_axis)
    for answer, num_here in [(last, 1), *((other, 0) for other in others)]:
        errors = answer.split(" | ")
        assert len(errors) == len(OUTSIDE)
        expected = f"outside 0..12 (1 in the global batch, {num_here} on this rank)"
        assert all(expected in error for error in errors)


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


def broken_rows(world_size: int, kind: str) -> str:
    """The error of a step for each kind of invalid rows on the last rank, then of a valid step."""
    head = make_head(kind, label_tree("vtree", 13), class_mesh(world_size))
    answers = []
    for how, break_them in BROKEN.items():
        rows = torch.zeros(2, 3), torch.tensor([0, 1])
        if here(world_size) == world_size - 1:
            rows = break_them(*rows)
        answers.append(f"{how}: {error_of_step(head, *rows)}")
    answers.append(f"valid: {error_of_step(head, torch.zeros(2, 3), torch.tensor([0, 1]))}")
    return " | ".join(answers)


@pytest.mark.parametrize("kind", ["ce", "hierarchical_softmax"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_invalid_rows_raise_an_error_on_every_rank_and_the_next_step_succeeds(world_size, kind):
    for answer in one_line_on_every_rank(world_size, broken_rows, kind):
        *broken, valid = answer.split(" | ")
        assert len(broken) == len(BROKEN)
        for error in broken:
            assert f"on 1 of {world_size} ranks" in error
            assert "pass features as a float tensor [b, 3]" in error
        assert valid == "valid: no error"


# ---- NaN ----------------------------------------------------------------------------------------


def nan_features(world_size: int, kind: str) -> str:
    """One row of the first rank is NaN."""
    head = make_head(kind, label_tree("vtree", 13), class_mesh(world_size))
    features = torch.ones(3, 3)
    if here(world_size) == 0:
        features[1, 2] = torch.nan
    return error_of_step(head, features, torch.tensor([0, 1, 2]))


def nan_weight(world_size: int, kind: str, weighting: str, class_id: int) -> str:
    """The vector of one class is NaN on the rank that stores it."""
    head = make_head(kind, label_tree(weighting, 13), class_mesh(world_size))
    tree = head.label_tree if isinstance(head, HierarchicalSoftmaxHead) else head.tree
    weights, node = head.engine.weights, int(tree.node_of_class[class_id])
    if weights.start <= node < weights.stop:
        with torch.no_grad():
            head.weight[node - weights.start] = torch.nan
    return error_of_step(head, torch.ones(3, 3), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_nan_features_raise_an_error(kind):
    (answer,) = one_line_on_every_rank(1, nan_features, kind)
    assert answer.startswith(
        "FloatingPointError: the loss is NaN; on rank 0, 1 of 3 rows of features (row 1) and 0 of"
    )


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_a_nan_weight_vector_raises_an_error(kind, weighting):
    """Test one class that has a row in the batch and one that does not."""
    for class_id in (1, 7):
        (answer,) = one_line_on_every_rank(1, nan_weight, kind, weighting, class_id)
        assert answer.startswith("FloatingPointError: the loss is NaN; on rank 0, 0 of 3 rows")
        assert "1 of" in answer.partition("features and ")[2]


def all_nan(world_size: int) -> str:
    answers = []
    for kind in EVERY_KIND:
        answers.append(nan_features(world_size, kind))
        answers.append(nan_weight(world_size, kind, "vtree", 1))
    return " | ".join(answers)


@pytest.mark.parametrize("world_size", [2, 4])
def test_nan_on_one_rank_raises_an_error_that_names_that_rank_on_every_rank(world_size):
    answers = [answer.split(" | ") for answer in one_line_on_every_rank(world_size, all_nan)]
    assert all(errors == answers[0] for errors in answers)
    assert len(answers[0]) == 2 * len(EVERY_KIND)
    for of_features, of_vector in zip(answers[0][0::2], answers[0][1::2], strict=True):
        assert "; on rank 0, 1 of 3 rows of features (row 1) and 0 of" in of_features
        assert of_features.count("on rank") == 1
        # The rank depends on the sharding.
        assert of_vector.count("on rank") == 1
        assert ", 0 of 3 rows of features and 1 of" in of_vector


def nan_logits_only(world_size: int) -> str:
    """All inputs are finite, but their product is inf - inf."""
    head = make_head("ce", LabelTree.dense(4), class_mesh(world_size))
    with torch.no_grad():
        head.weight.fill_(1e38)
    features = torch.tensor([[1e38, -1e38, 0.0]])
    return error_of_step(head, features, torch.tensor([0]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_logits_that_overflow_to_nan_raise_an_error(world_size):
    for answer in one_line_on_every_rank(world_size, nan_logits_only):
        assert answer.startswith(
            "FloatingPointError: the loss is NaN; features and weight vectors are"
        )


# ---- hyperparameters and constants that do not fit the classes ----------------------------------


def built(world_size: int, config: HeadConfig, num_classes: int, num_vectors: int) -> str:
    vectors = np.random.default_rng(0).normal(size=(num_vectors, 4))
    try:
        build_head(
            config,
            dim=3,
            num_classes=num_classes,
            label_vectors=vectors,
            mesh=class_mesh(world_size),
            seed=0,
            device="cpu",
        )
    except ValueError as error:
        return str(error)
    return "no error"


K_TOO_LARGE = "head.loss.k is 5, but there are only 5 classes: lower k"
VECTORS = "there are 6 label vectors, but 5 classes"
RECIPES = [
    (HeadConfig(loss=SmoothTopK(k=5)), 5, K_TOO_LARGE),
    (HeadConfig(loss=TopKHinge(k=5)), 5, K_TOO_LARGE),
    (HeadConfig(loss=TopKHinge(k=4)), 5, "no error"),
    (HeadConfig(weights=VTreeConfig()), 6, VECTORS),
    (HeadConfig(loss=SimLoss()), 6, "simloss: label_vectors have shape [6, 4], but there are"),
    (HeadConfig(num_classes=6), 5, "head.num_classes is 6, but the shards have 5 classes"),
]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("config", "num_vectors", "message"), RECIPES)
def test_a_recipe_that_does_not_match_the_classes_raises_an_error_on_every_rank(
    world_size, config, num_vectors, message
):
    for answer in one_line_on_every_rank(world_size, built, config, 5, num_vectors):
        assert answer.startswith(message)


UNFIT = {
    "head.loss.k is 4, but there are only 4 classes: lower k": SmoothTopK(k=4),
    "head.loss.k is 5, but there are only 4 classes: lower k": TopKHinge(k=5),
    "noise distribution over 3 classes, but the head has 4": NoiseContrastiveEstimation().prepare(
        ClassFacts(3, torch.ones(3))
    ),
    "simloss has label vectors for 5 classes, but the head has 4": SimLoss().prepare(
        ClassFacts(5, None, torch.ones(5, 2))
    ),
}


@pytest.mark.parametrize("message", UNFIT)
def test_a_head_rejects_a_loss_that_does_not_match_the_classes(message):
    with pytest.raises(ValueError, match=message):
        ClassHead(3, 4, UNFIT[message])


def test_classes_cannot_be_appended_to_a_head_with_per_class_data():
    facts = ClassFacts(4, torch.ones(4), torch.ones(4, 2))
    for loss in (NoiseContrastiveEstimation(), SimLoss()):
        with pytest.raises(ValueError, match="but the head has 5 classes: create a new head"):
            append_classes(ClassHead(3, 4, loss.prepare(facts)), [-1])
    weighted = ClassHead(3, 4, CrossEntropy(), class_weights=torch.ones(4))
    with pytest.raises(ValueError, match="class_weights for 4 classes, but none for new classes"):
        append_classes(weighted, [-1])
    assert weighted.num_classes == 4
    with pytest.raises(
        ValueError, match="has a tree of 13 nodes, but the head has 14: create a new head"
    ):
        append_classes(HierarchicalSoftmaxHead(3, classes_at_13_nodes()), [-1])


def classes_at_13_nodes() -> LabelTree:
    return LabelTree.from_parents([-1] + 12 * [0], [-1, *range(12)])


# ---- trees --------------------------------------------------------------------------------------


def trees_that_differ(world_size: int, data_axis: int) -> str:
    """All ranks have the same number of nodes and classes, but the last rank has a different
    tree."""
    last = here(world_size) == world_size - 1
    parents = [-1, 0, 0, 1, 1, 2 if last else 1, 2]
    tree = LabelTree.from_parents(parents, [-1, -1, -1, 0, 1, 2, 3])
    head = make_head("ce", tree, class_mesh(world_size, data_axis))
    return error_of_step(head, torch.zeros(2, 3), torch.tensor([0, 1]))


@pytest.mark.parametrize(("world_size", "data_axis"), [(2, 1), (2, 2), (4, 2)])
def test_different_trees_raise_an_error_on_every_rank(world_size, data_axis):
    for answer in one_line_on_every_rank(world_size, trees_that_differ, data_axis):
        assert answer.startswith("ValueError: the heads of the ranks differ in their label trees (")


# What the last rank does differently, and what the error must name.
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "loss": ({"loss": BinaryCrossEntropy()}, "losses"),
    "option of the loss": ({"loss": CrossEntropy(label_smoothing=0.1)}, "losses"),
    "logit map": ({"logits": Cosine(scale=3)}, "logit maps"),
    "option of the logit map": ({"logits": Dot(scale=3)}, "logit maps"),
    "class weights": ({"class_weights": torch.tensor([1.0, 1, 1, 2])}, "class weights"),
    "ignore_index": ({"ignore_index": -1}, "ignore_index"),
    "bias": ({"bias": False}, "parameters"),
    "dim": ({"dim": 5}, "parameters"),
    "dtype of the rows": ({"dtype": torch.bfloat16}, "parameters"),
    "seed": ({"seed": 7}, "mode and draw"),
    "draw": ({"draw": 3}, "mode and draw"),
    "evaluation mode": ({"training": False}, "mode and draw"),
    "autocast": ({"autocast": torch.bfloat16}, "dtype of features"),
    "dtype of features": ({"features": torch.float64}, "dtype of features"),
    "row weights": ({"row_weights": True}, "row weights"),
    "list of labels": ({"labels": [0, 1]}, "inputs are invalid"),
    "NumPy labels": ({"labels": np.array([0, 1])}, "inputs are invalid"),
    "no labels": ({"labels": None}, "inputs are invalid"),
    "NumPy features": ({"features": np.zeros((2, 3), np.float32)}, "inputs are invalid"),
    "list of row weights": ({"row_weights": [1.0, 1.0]}, "inputs are invalid"),
    "float labels": ({"labels": torch.tensor([0.0, 1.0])}, "inputs are invalid"),
}


def error_of_a_difference(changes: dict[str, Any], mesh: Any) -> str:
    """The error of a step of a head with these changes."""
    changes = dict(changes)
    features, labels = changes.pop("features", None), changes.pop("labels", torch.tensor([0, 1]))
    dim, weighted = changes.pop("dim", 3), changes.pop("row_weights", None)
    draw, training = changes.pop("draw", 0), changes.pop("training", True)
    autocast = changes.pop("autocast", None)
    loss = changes.pop("loss", CrossEntropy())
    head = ClassHead(dim, 4, loss, mesh=mesh, **{"class_weights": torch.ones(4), **changes})
    head.train(training)
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


def errors_if_the_last_rank_differs(data_axis: int) -> dict[str, str]:
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    mesh = rank_mesh(data_axis)
    return {
        name: error_of_a_difference(changes if last else {}, mesh)
        for name, (changes, _) in DIFFERENCES.items()
    }


@pytest.mark.parametrize(("world_size", "data_axis"), [(2, 1), (2, 2), (4, 2)])
def test_a_rank_that_differs_raises_an_error_on_every_rank(world_size, data_axis):
    for errors in run_on_ranks(world_size, errors_if_the_last_rank_differs, data_axis):
        for name, (_, named) in DIFFERENCES.items():
            assert named in errors[name], (name, errors[name])
            assert "\n" not in errors[name]


@pytest.mark.parametrize(
    "name", [name for name, (_, named) in DIFFERENCES.items() if "inputs" in named]
)
def test_invalid_inputs_raise_one_line_that_says_what_to_pass(name):
    error = error_of_a_difference(DIFFERENCES[name][0], None)
    assert "pass features as a float tensor [b, 3], labels as an integer tensor [b]" in error


def steps_with_a_wrong_count(data_axis: int) -> list[tuple[float, bool, list[str]]]:
    """For each wrong number of features and labels on the last rank, the loss, whether the gradient
    of the features is NaN, and the warnings. The last step is valid."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    head = ClassHead(3, 4, CrossEntropy(), mesh=rank_mesh(data_axis), ignore_index=0)
    found = []
    for num_features, num_labels in ((3, 3), (1, 1), (2, 3), (0, 0), (2, 2)):
        if rank < size - 1:
            num_features = num_labels = 2
        features = torch.ones(num_features, 3, requires_grad=True)
        labels = torch.ones(num_labels, dtype=torch.int64)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = head(features, labels, rows_of_ranks=[2] * size)
        loss.backward()
        is_nan = bool(features.grad.isnan().any())
        found.append((loss.item(), is_nan, [str(each.message) for each in caught]))
    return found


@pytest.mark.parametrize(("world_size", "data_axis"), [(2, 1), (2, 2), (4, 2)])
def test_a_wrong_row_count_on_one_rank_makes_the_loss_nan_on_every_rank(world_size, data_axis):
    *others, last = run_on_ranks(world_size, steps_with_a_wrong_count, data_axis)
    for rank in (*others, last):
        *wrong, (valid, is_nan, _) = rank
        assert all(math.isnan(loss) for loss, _, _ in wrong)
        assert valid == pytest.approx(math.log(4), abs=0.1)
        assert not is_nan
    for _, _, caught in last[:-1]:
        assert [each.count("rows_of_ranks lists 2 rows for this rank") for each in caught] == [1]
    assert not any(caught for rank in others for _, _, caught in rank)


@pytest.mark.parametrize("scale", [1e16, 5e37, torch.inf, torch.nan])
def test_weights_that_overflow_raise_one_line(scale):
    head = ClassHead(3, 4, CrossEntropy())
    with pytest.raises(ValueError, match="row weights"):
        head(torch.zeros(2, 3), torch.tensor([0, 1]), torch.full((2,), scale))
    with pytest.raises(ValueError, match="class_weights"):
        ClassHead(3, 4, CrossEntropy(), class_weights=torch.tensor([1, 1, 1, scale]))


def test_class_weights_that_vanish_in_float32_raise_one_line():
    with pytest.raises(ValueError, match="class_weights"):
        ClassHead(3, 4, CrossEntropy(), class_weights=torch.full((4,), 1e-60, dtype=torch.float64))


def test_a_head_is_printed_with_its_settings():
    shown = repr(ClassHead(3, 4, CrossEntropy(), bias=False))
    for part in ("dim=3", "classes=4", "dense", "Dot(", "CrossEntropy(", "bias=False", "float32"):
        assert part in shown


def head_of_a_cycle(world_size: int) -> str:
    """A cycle among the parents is detected before any collective."""
    try:
        make_head("ce", LabelTree.from_parents([-1, 2, 1], [0, 1, 2]), class_mesh(world_size))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_cycle_raises_an_error_on_every_rank(world_size):
    for answer in one_line_on_every_rank(world_size, head_of_a_cycle):
        assert answer.startswith("label tree: node 1 does not reach a root")


# ---- ranks without rows or classes --------------------------------------------------------------


def steps_with_empty_ranks(world_size: int):
    """Train on two classes and two rows. With four ranks, the last two have no classes, and the
    first three have no rows."""
    found = {}
    for kind in LOSS_KINDS:
        loss = make_loss(kind, 2)
        head = ClassHead(3, 2, loss, mesh=class_mesh(world_size), init_std=0.5, seed=1)
        rows = slice(0, 2 if here(world_size) == world_size - 1 else 0)
        features = torch.eye(3)[:2][rows].requires_grad_()
        value = head(features, torch.arange(2)[rows])
        value.backward()
        found[kind] = value.item(), features.grad.numpy(), gradient_of_nodes(head).numpy()
    return found


def test_ranks_without_rows_or_classes_participate():
    alone, ranks = steps_with_empty_ranks(1), run_on_ranks(4, steps_with_empty_ranks, 4)
    assert [len(answers["ce"][2]) for answers in ranks] == [1, 1, 0, 0]
    assert [len(answers["ce"][1]) for answers in ranks] == [0, 0, 0, 2]
    for kind, (loss, by_features, by_nodes) in alone.items():
        for answers in ranks:
            assert answers[kind][0] == pytest.approx(loss, rel=1e-5)
        for index, expected in ((1, by_features), (2, by_nodes)):
            parts = np.concatenate([answers[kind][index] for answers in ranks])
            np.testing.assert_allclose(parts, expected, rtol=1e-4, atol=1e-6, err_msg=kind)


def no_rows_at_all(world_size: int) -> str:
    head = make_head("ce", LabelTree.dense(2), class_mesh(world_size))
    return error_of_step(head, torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))


def one_row_for_a_batch_loss(world_size: int) -> str:
    head = make_head("batch_max_margin", LabelTree.dense(2), class_mesh(world_size))
    rows = slice(0, 1 if here(world_size) == 0 else 0)
    return error_of_step(head, torch.zeros(1, 3)[rows], torch.zeros(1, dtype=torch.int64)[rows])


@pytest.mark.parametrize("world_size", [1, 3])
def test_too_few_rows_in_the_global_batch_raise_an_error_on_every_rank(world_size):
    for answer in one_line_on_every_rank(world_size, no_rows_at_all):
        assert answer.startswith("ValueError: the global batch has no rows")
    for answer in one_line_on_every_rank(world_size, one_row_for_a_batch_loss):
        assert answer.startswith("ValueError: batch_max_margin needs a global batch of at least 2")
