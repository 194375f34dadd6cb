"""The alignment of losses with the Principle of Logit Separation.

Paper 002 proves alignment. These tests check definition 1 with a search over logits, for
several hyperparameters of each loss.
"""

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch
from scipy.optimize import LinearConstraint, minimize
from torch import Tensor

from heads.losses import (
    LOSSES,
    Asymmetric,
    BatchCrossEntropy,
    BatchMaxMargin,
    BinaryCrossEntropy,
    Block,
    ClassFacts,
    CorrectClassQuadratic,
    CrossEntropy,
    DecoupledSoftmax,
    Loss,
    MaxMargin,
    NoiseContrastiveEstimation,
    Quadratic,
    Rows,
    SelfNormalization,
    SigmoidCauchySchwarz,
    SigmoidTanimoto,
    SimLoss,
    SmoothTopK,
    SoftmaxCauchySchwarz,
    SoftmaxTanimoto,
    SphericalBound,
    SphericalSoftmax,
    TaylorSoftmax,
    TopKHinge,
)
from heads.losses.hierarchical import HierarchicalSoftmax
from heads.tree import LabelTree

NUM_CLASSES = 3
SAMPLES = [[0, 0], [0, 1]]  # labels of two rows; no row has class 2
NOISE = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
VECTORS = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
FACTS = ClassFacts(NUM_CLASSES, NOISE, VECTORS)


def name(loss: Loss) -> str:
    numbers = {k: v for k, v in vars(loss).items() if isinstance(v, int | float)}
    return " ".join([loss.kind, *(f"{k}={v:g}" for k, v in numbers.items())])


def draws(loss: Loss, labels: Tensor) -> Iterator[tuple[float, Tensor | None]]:
    """All outcomes of a step's draw: the probability of each, and the weight of each class [K]."""
    if isinstance(loss, CrossEntropy) and loss.sample_rate < 1:
        rate = loss.sample_rate
        own = torch.isin(torch.arange(NUM_CLASSES), labels)
        others = (~own).nonzero().squeeze(1)
        for taken in itertools.product([0.0, 1.0], repeat=len(others)):
            weights = own.double()
            weights[others] = torch.tensor(taken, dtype=torch.float64) / rate
            yield math.prod(rate if each else 1 - rate for each in taken), weights
    elif isinstance(loss, NoiseContrastiveEstimation) and loss.samples is not None:
        for drawn in itertools.product(range(NUM_CLASSES), repeat=loss.samples):
            counts = torch.bincount(torch.tensor(drawn), minlength=NUM_CLASSES)
            probability = float(loss.q[list(drawn)].prod())
            yield probability, counts / (loss.samples * loss.q)
    else:
        yield 1.0, None


def value_and_gradient(loss: Loss, logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """The expected loss over all draws for the given logits [m, K], and its gradient."""
    value, gradient = 0.0, torch.zeros_like(logits)
    for probability, weights in draws(loss, labels):
        leaf = logits.clone().requires_grad_()
        classes = torch.arange(logits.shape[1])
        block = Block.of(classes, labels, labels, leaf, weights)
        drawn = loss.value(loss.merge([loss.statistics(leaf, block)]), Rows(len(classes), labels))
        grad, by_true = torch.autograd.grad(
            drawn, (leaf, block.true), allow_unused=True, materialize_grads=True
        )
        value += probability * float(drawn.detach())
        gradient += probability * block.positions.add(grad.contiguous(), by_true)
    return value, gradient


def value(loss: Loss, logits: Tensor, labels: Tensor) -> float:
    return value_and_gradient(loss, logits, labels)[0]


def separated(scores: Tensor, labels: Tensor) -> bool:
    """Definition 1 of paper 002: every true score is above every false score of any row."""
    own = torch.zeros_like(scores, dtype=torch.bool)
    own[torch.arange(len(labels)), labels] = True
    return bool(scores[own].min() > scores[~own].max())


def test_the_cases_cover_every_loss():
    aligned = {loss.kind for loss, _ in ALIGNED}
    not_aligned = {loss.kind for loss in (*SHIFTED, *RATIOS)}
    separate = {"sigmoid_cs", "hierarchical_softmax"}
    assert aligned | not_aligned | separate == {*LOSSES}
    assert aligned & (not_aligned | separate) == {"ce"}  # depends on its hyperparameters
    assert CrossEntropy.aligned_if


# ------------------------------------------------------------------ losses that are not aligned

SHIFTED = [
    *(
        CrossEntropy(label_smoothing=smoothing, sample_rate=rate)
        for smoothing in (0.0, 0.1, 0.9)
        for rate in (1.0, 0.1)
    ),
    DecoupledSoftmax(),
    MaxMargin(0.1),
    MaxMargin(1.0),
    SoftmaxCauchySchwarz(),
    SoftmaxTanimoto(),
    *(TopKHinge(k, alpha) for k in (1, 2) for alpha in (0.0, 1.0)),
    *(SmoothTopK(k, tau, alpha) for k in (1, 2) for tau in (0.1, 1.0) for alpha in (0.0, 1.0)),
    SphericalBound(0.5),
    SphericalBound(2.0),
    SimLoss().prepare(FACTS),
    SimLoss(0.5).prepare(FACTS),
]
RATIOS = [TaylorSoftmax(), SphericalSoftmax(0.01), SphericalSoftmax(1.0)]


@pytest.mark.parametrize("labels", SAMPLES)
@pytest.mark.parametrize("loss", SHIFTED, ids=name)
def test_a_loss_of_differences_does_not_change_if_rows_are_shifted(loss, labels):
    """Therefore, separated logits near its infimum can be shifted until they are not separated."""
    assert not loss.aligned
    labels = torch.tensor(labels)
    logits = torch.tensor([[4.0, -3.0, -2.5], [2.0, -1.0, -3.0]], dtype=torch.float64)
    logits[1] = logits[1].roll(int(labels[1]))
    shifted = logits + torch.tensor([[-20.0], [20.0]])
    assert separated(logits, labels)
    assert not separated(shifted, labels)
    assert value(loss, shifted, labels) == pytest.approx(value(loss, logits, labels), abs=1e-9)


@pytest.mark.parametrize("kind", ["topk_hinge", "smooth_topk"])
@pytest.mark.parametrize("k", [2, 3])
def test_top_k_losses_reach_their_infimum_with_k_minus_1_false_logits_above_the_true_one(kind, k):
    """One of k predictions is correct, so k - 1 false logits of the same row may be larger."""
    alpha = 200.0
    logits = torch.tensor([[0, *[alpha] * (k - 1), -alpha]], dtype=torch.float64)
    labels = torch.tensor([0])
    loss = LOSSES[kind](k=k)
    assert value(loss, logits, labels) == pytest.approx(0, abs=1e-12)
    assert not separated(logits, labels)
    # If the k-th false logit is also larger, the loss is not near its infimum.
    logits[0, -1] = alpha
    assert value(loss, logits, labels) > 1


def test_hierarchical_softmax_reaches_its_infimum_with_unseparated_logits_of_leaves():
    """Each group of siblings can be shifted independently, so the logits of the leaves are not
    separated."""
    tree = LabelTree.from_parents([-1, -1, 1, 1], [0, -1, 1, 2])
    first, inner = tree.node_of_class[0], tree.parent[tree.node_of_class[1]]
    leaves = torch.tensor(tree.node_of_class).long()
    nodes = torch.zeros(2, tree.num_nodes, dtype=torch.float64)
    labels = torch.tensor([0, 1])
    nodes[0, first], nodes[0, inner] = 40.0, 0.0
    nodes[1, first], nodes[1, inner] = 0.0, 40.0
    nodes[:, leaves[1]], nodes[:, leaves[2]] = 40.0, 0.0
    loss = HierarchicalSoftmax().prepare(ClassFacts(tree.num_nodes, tree=tree))
    assert not loss.aligned
    shift = torch.tensor([[100.0], [-100.0]])
    for shifts in (0 * shift, shift):
        moved = nodes.clone()
        moved[:, leaves[1:]] += shifts
        assert value(loss, moved, leaves[labels]) == pytest.approx(0, abs=1e-12)
        assert not separated(moved[:, leaves], labels)


def test_sigmoid_cauchy_schwarz_reaches_its_infimum_with_unseparated_logits():
    """Section 3.4 of paper 002: a false logit of one row equals the true logit of another."""
    alpha = 1e7
    s = torch.tensor([[0.5, 0.5 / alpha], [0.5 / alpha, 0.5 / alpha**2]], dtype=torch.float64)
    logits, labels = torch.logit(s), torch.tensor([0, 0])
    assert value(SigmoidCauchySchwarz(), logits, labels) < 1e-12
    assert not SigmoidCauchySchwarz().aligned
    assert not separated(logits, labels)


@pytest.mark.parametrize("loss", RATIOS, ids=name)
def test_a_loss_of_ratios_of_scores_reaches_its_infimum_with_unseparated_scores(loss):
    """One row has large scores and the other has small ones. In both, the true score dominates."""
    assert not loss.aligned
    logits = torch.tensor([[1e9, 1e5], [1e4, -1.0]], dtype=torch.float64)
    if loss.kind == "spherical_softmax":
        logits[1, 1] = 0
    labels = torch.tensor([0, 0])
    assert value(loss, logits, labels) < 1e-7
    assert not separated(loss.score(logits), labels)


# ------------------------------------------------------------------ losses that are aligned


def smoothed_entropy(smoothing: float) -> float:
    """The entropy of the target, which is the infimum of cross-entropy with label smoothing."""
    target = torch.full((NUM_CLASSES,), smoothing / NUM_CLASSES, dtype=torch.float64)
    target[0] += 1 - smoothing
    return float(-torch.xlogy(target, target).sum())


def nce_infimum(t: int, label: int) -> float:
    """The infimum of a row: the true logit is 0, where g_y = 1 / (1 + t q_y), and the false terms
    vanish."""
    noise = t * float(NOISE[label])
    return math.log1p(noise) + noise * math.log1p(1 / noise)


# Losses, and the infimum of a row with a given label.
ALIGNED = [
    *(
        (CrossEntropy(smoothing, 1e-3), lambda _, e=smoothing: smoothed_entropy(e))
        for smoothing in (0.0, 0.9)
    ),
    (CrossEntropy(z_loss=1e-3, sample_rate=0.1), lambda _: 0.0),
    *((SelfNormalization(alpha), lambda _: 0.0) for alpha in (1e-3, 3.0)),
    (BatchCrossEntropy(), lambda _: 0.0),
    (BatchMaxMargin(0.1), lambda _: 0.0),
    (NoiseContrastiveEstimation(10).prepare(FACTS), lambda y: nce_infimum(10, y)),
    (BinaryCrossEntropy(), lambda _: 0.0),
    *((each, lambda _: 0.0) for each in (Asymmetric(), Asymmetric(2.0, 2.0, margin=0.0))),
    (SigmoidTanimoto(), lambda _: -1.0),
    (Quadratic(), lambda _: 0.0),
    *((CorrectClassQuadratic(w), lambda _: 0.0) for w in (3.0, None)),
]


def least(loss: Loss, labels: Tensor, constraint: LinearConstraint) -> float:
    """The smallest value that a search over logits satisfying the constraint finds."""
    shape = len(labels), NUM_CLASSES

    def goal(flat: np.ndarray) -> tuple[float, np.ndarray]:
        at, by = value_and_gradient(loss, torch.from_numpy(flat).view(shape), labels)
        return at, by.numpy().ravel()

    start = np.random.default_rng(0).normal(size=shape).ravel()
    options = {"maxiter": 300, "ftol": 1e-10}
    found = minimize(goal, start, jac=True, method="SLSQP", constraints=constraint, options=options)
    assert (constraint.A @ found.x >= constraint.lb - 1e-9).all()
    return float(found.fun)


def gaps(labels: Tensor, rows: Iterable[int]) -> np.ndarray:
    """The matrix that maps flat logits to differences: true logits of `rows` minus each false logit
    of any row."""
    shape = len(labels), NUM_CLASSES
    found = []
    for of_true, of_false in itertools.product(rows, np.ndindex(shape)):
        if of_false[1] != labels[of_false[0]]:
            gap = np.zeros(shape)
            gap[of_true, labels[of_true]], gap[of_false] = 1, -1
            found.append(gap.ravel())
    return np.stack(found)


def least_separated(loss: Loss, labels: Tensor) -> float:
    return least(loss, labels, LinearConstraint(gaps(labels, range(len(labels))), lb=0))


def least_unseparated(loss: Loss, labels: Tensor) -> float:
    """The smallest value if the true logit of the first row is not above some false logit."""
    of_first = gaps(labels, [0])
    return min(least(loss, labels, LinearConstraint(-gap[None], lb=0)) for gap in of_first)


@pytest.mark.parametrize("labels", SAMPLES)
@pytest.mark.parametrize(("loss", "infimum"), ALIGNED, ids=[name(each) for each, _ in ALIGNED])
def test_an_aligned_loss_is_near_its_infimum_only_if_logits_are_separated(loss, infimum, labels):
    assert loss.aligned
    bound = sum(infimum(label) for label in labels) / len(labels)
    assert least_separated(loss, torch.tensor(labels)) == pytest.approx(bound, abs=1e-6)
    assert least_unseparated(loss, torch.tensor(labels)) > bound + 1e-5


@pytest.mark.parametrize("loss", [CrossEntropy(), MaxMargin(), SigmoidCauchySchwarz()], ids=name)
def test_the_same_search_finds_unseparated_logits_for_losses_that_are_not_aligned(loss):
    assert least_unseparated(loss, torch.tensor([0, 1])) < 1e-5


def test_the_minimum_with_smoothing_and_sampling_may_be_at_unseparated_logits():
    """A class without a row gets its share of the target only in the few steps that draw it."""
    loss = CrossEntropy(label_smoothing=0.9, z_loss=1e-3, sample_rate=0.1)
    assert not loss.aligned
    labels = torch.tensor([0, 0])
    assert least_unseparated(loss, labels) < least_separated(loss, labels) - 0.01
