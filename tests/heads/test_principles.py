"""What the papers prove of their losses, and where their lemmas fail."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heads import ClassHead
from heads.losses import LOSSES, Block, CorrectClassQuadratic, Loss, Quadratic, Rows
from heads.tree import LabelTree
from tests.heads.cases import noise

GAMMA = 0.7


def value(loss: Loss, logits: Tensor, labels: Tensor) -> float:
    """The loss of given logits [m, K]."""
    num_classes = logits.shape[1]
    block = Block.of(torch.arange(num_classes), labels, labels, logits)
    rows = Rows(num_classes, labels)
    return float(loss.value(loss.merge([loss.statistics(logits, block)]), rows))


def separated(logits: Tensor, labels: Tensor) -> bool:
    """002 definition 1: every true logit above every false one, of any row."""
    own = torch.zeros_like(logits, dtype=torch.bool)
    own[torch.arange(len(labels)), labels] = True
    return bool(logits[own].min() > logits[~own].max())


# ------------------------------------------------------------------ losses that are not aligned


# Losses of differences of logits in a row: their hyperparameters and infimum.
DIFFERENCES = {
    "ce": ({}, 0),
    "max_margin": ({"gamma": GAMMA}, 0),
    "softmax_cs": ({}, 0),
    "softmax_tanimoto": ({}, -1),
    "topk_hinge": ({"k": 1, "alpha": 1.0}, 0),
    "smooth_topk": ({"k": 1, "tau": 1.0, "alpha": 1.0}, 0),
    "simloss": ({"vectors": torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)}, 0),
}
SPHERICAL = {"taylor_softmax": {}, "spherical_softmax": {"eps": 1e-9}}


def test_every_loss_that_is_not_aligned_is_refuted():
    not_aligned = {kind for kind, loss in LOSSES.items() if not loss.aligned}
    alone = {"sigmoid_cs", "spherical_bound", "hierarchical_softmax"}
    assert not_aligned == {*DIFFERENCES, *SPHERICAL, *alone}


def shifted(alpha: float) -> tuple[Tensor, Tensor]:
    """The counter-example of 002, section 3.1."""
    logits = torch.tensor([[2 * alpha, alpha], [-2 * alpha, -alpha]], dtype=torch.float64)
    return logits, torch.tensor([0, 1])


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_a_loss_of_differences_goes_to_its_infimum_with_logits_unseparated(kind):
    options, infimum = DIFFERENCES[kind]
    logits, labels = shifted(40.0)
    loss = LOSSES[kind](**options)
    assert not loss.aligned
    assert value(loss, logits, labels) == pytest.approx(infimum, abs=1e-12)
    assert not separated(logits, labels)


@pytest.mark.parametrize("kind", ["topk_hinge", "smooth_topk"])
@pytest.mark.parametrize("k", [2, 3])
def test_with_k_above_1_a_loss_goes_to_its_infimum_with_false_logits_above_the_true_one(kind, k):
    """Of k predictions one is right: k - 1 false logits of the row itself may be above it."""
    alpha = 200.0
    logits = torch.tensor([[0, *[alpha] * (k - 1), -alpha]], dtype=torch.float64)
    labels = torch.tensor([0])
    loss = LOSSES[kind](k=k)
    assert value(loss, logits, labels) == pytest.approx(0, abs=1e-12)
    assert not separated(logits, labels)
    # The k-th false logit counts: once it is above, so is the loss.
    logits[0, -1] = alpha
    assert value(loss, logits, labels) > 1


def test_hierarchical_softmax_goes_to_its_infimum_with_the_logits_of_leaves_unseparated():
    """It has no row of logits, one a class: any group of siblings may be shifted on its own. So
    not even the logits of the leaves, taken for those of the classes, are separated."""
    tree = LabelTree.from_parents([-1, -1, 1, 1], [0, -1, 1, 2])
    first, inner = tree.node_of_class[0], tree.parent[tree.node_of_class[1]]
    leaves = torch.from_numpy(tree.node_of_class.copy())
    nodes = torch.zeros(2, tree.num_nodes, dtype=torch.float64)
    labels = torch.tensor([0, 1])
    nodes[0, first], nodes[0, inner] = 40.0, 0.0
    nodes[1, first], nodes[1, inner] = 0.0, 40.0
    nodes[:, leaves[1]], nodes[:, leaves[2]] = 40.0, 0.0
    loss = LOSSES["hierarchical_softmax"](tree)
    assert not loss.aligned
    shift = torch.tensor([[100.0], [-100.0]])
    for shifts in (0 * shift, shift):
        moved = nodes.clone()
        moved[:, leaves[1:]] += shifts
        assert value(loss, moved, leaves[labels]) == pytest.approx(0, abs=1e-12)
        assert not separated(moved[:, leaves], labels)


def test_sigmoid_cauchy_schwarz_goes_to_its_infimum_with_logits_unseparated():
    """002, section 3.4: a false logit of one row equals the true one of another."""
    alpha = 1e7
    s = torch.tensor([[0.5, 0.5 / alpha], [0.5 / alpha, 0.5 / alpha**2]], dtype=torch.float64)
    logits, labels = torch.logit(s), torch.tensor([0, 0])
    assert value(LOSSES["sigmoid_cs"](), logits, labels) < 1e-12
    assert not separated(logits, labels)


def test_the_spherical_bound_does_not_see_a_row_shifted():
    logits = torch.randn(3, 5, dtype=torch.float64)
    labels = torch.tensor([0, 3, 4])
    loss = LOSSES["spherical_bound"](xi=1.3)
    moved = logits + torch.tensor([[30.0], [-40.0], [0.0]])
    assert value(loss, moved, labels) == pytest.approx(value(loss, logits, labels), abs=1e-8)
    assert not separated(moved, labels)


@pytest.mark.parametrize("kind", SPHERICAL)
def test_spherical_losses_are_small_with_scores_unseparated(kind):
    loss = LOSSES[kind](**SPHERICAL[kind])
    # At z = -1 Taylor's score is least; rows of large and of small level.
    logits = torch.tensor([[1e9, 1e3], [-1.0, 1e2]], dtype=torch.float64)
    if kind == "spherical_softmax":
        logits[1, 0] = 0
    labels = torch.tensor([0, 1])
    assert value(loss, logits, labels) < 1e-3
    assert not separated(loss.score(logits), labels)


# ------------------------------------------------------------------ losses that are aligned

NUM_ROWS, NUM_CLASSES = 3, 4
# (loss, its infimum, how far above it every logit is still separated, logits near the infimum).
# The bounds follow from the terms of one row, of which none is above m times the mean's excess.
ALIGNED = {
    "batch_ce": (LOSSES["batch_ce"](), 0.0, 1 / (2 * NUM_ROWS**2), (0.0, -12.0)),
    "batch_max_margin": (LOSSES["batch_max_margin"](GAMMA), 0.0, GAMMA / NUM_ROWS, (1.0, 0.0)),
    "self_norm": (LOSSES["self_norm"](0.3), 0.0, 0.01 / NUM_ROWS, (0.0, -9.0)),
    "bce": (LOSSES["bce"](), 0.0, math.log(2) / NUM_ROWS, (6.0, -6.0)),
    "sigmoid_tanimoto": (LOSSES["sigmoid_tanimoto"](), -1.0, 0.1 / NUM_ROWS, (8.0, -8.0)),
    "quadratic": (LOSSES["quadratic"](), 0.0, 0.125 / NUM_ROWS, (1.0, 0.0)),
    "ccql": (LOSSES["ccql"](2.0), 0.0, 0.125 / NUM_ROWS, (1.0, 0.0)),
}


def test_every_aligned_loss_is_tried():
    aligned = {kind for kind, loss in LOSSES.items() if loss.aligned}
    assert aligned == {*ALIGNED, "nce"}


@pytest.mark.parametrize("kind", ALIGNED)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), spread=st.floats(0, 6))
def test_a_small_value_of_an_aligned_loss_implies_separation(kind, seed, spread):
    loss, infimum, excess, (true, false) = ALIGNED[kind]
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (NUM_ROWS,), generator=generator)
    logits = torch.full((NUM_ROWS, NUM_CLASSES), false, dtype=torch.float64)
    logits[torch.arange(NUM_ROWS), labels] = true
    assert value(loss, logits, labels) < infimum + excess  # the claim is not empty
    logits += spread * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    if value(loss, logits, labels) < infimum + excess:
        assert separated(logits, labels)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), spread=st.floats(0, 6))
def test_a_small_value_of_nce_implies_separation_from_the_noise(seed, spread):
    """With u_j = z_j - log(t q_j): every true u above every false one. The infimum depends on t
    and q, as the expectation includes the true class."""
    t, q = 7, noise(NUM_CLASSES)
    loss = LOSSES["nce"](noise=q, t=t)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (NUM_ROWS,), generator=generator)
    u = torch.full((NUM_ROWS, NUM_CLASSES), -12.0, dtype=torch.float64)
    best = -(t * q).log()[labels]
    u[torch.arange(NUM_ROWS), labels] = best
    shift = (t * q).log()
    infimum = float(
        (torch.log1p(torch.exp(-best)) + (t * q)[labels] * torch.log1p(torch.exp(best))).mean()
    )
    noisy = u + spread * torch.randn(u.shape, generator=generator, dtype=torch.float64)
    excess = 0.02 * float((t * q).min()) / NUM_ROWS
    assert value(loss, u + shift, labels) < infimum + excess
    if value(loss, noisy + shift, labels) < infimum + excess:
        assert separated(noisy, labels)


# ------------------------------------------------------------------ lemmas of paper 001


def mixture(num_classes: int, dim: int, sigma: float, seed: int = 0):
    """Centres M [K, d] of unit length, and points whose mean and covariance in each class are
    exactly mu_k and sigma^2 I: the population of definition 3.1 as far as a quadratic sees it."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(num_classes, dim, generator=generator, dtype=torch.float64)
    centres = torch.nn.functional.normalize(centres, dim=1)
    steps = sigma * math.sqrt(dim) * torch.cat([torch.eye(dim), -torch.eye(dim)]).double()
    points = (centres[:, None, :] + steps).reshape(-1, dim)
    return centres, points, torch.arange(num_classes).repeat_interleave(2 * dim)


def linear_head(loss: Loss, rows: Tensor) -> ClassHead:
    head = ClassHead(rows.shape[1], len(rows), loss, bias=False, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(rows)
    return head


@pytest.mark.parametrize(("num_classes", "dim"), [(12, 5), (4, 9)])
@pytest.mark.parametrize("sigma", [0.05, 0.5])
def test_lemma_3_4_gives_the_minimum_of_the_quadratic_loss(num_classes, dim, sigma):
    """001, corrected: M (M'M + K sigma^2 I)^-1 and 1/2 sum sigma^2 / (K sigma^2 + lambda(MM'))."""
    centres, points, labels = mixture(num_classes, dim, sigma)
    ridge = centres.T @ centres + num_classes * sigma**2 * torch.eye(dim, dtype=torch.float64)
    head = linear_head(Quadratic(), centres @ torch.linalg.inv(ridge))
    loss = head(points, labels)
    loss.backward()
    eigenvalues = torch.linalg.eigvalsh(centres @ centres.T)
    minimum = (sigma**2 / (num_classes * sigma**2 + eigenvalues)).sum() / 2
    torch.testing.assert_close(loss.detach(), minimum, rtol=1e-9, atol=1e-10)
    assert head.weight.grad.abs().max() < 1e-10


def test_lemma_3_5_fails_for_a_large_w():
    """Its bound does not grow with w, and the loss at the centres does: noise at the true class."""
    centres, points, labels = mixture(num_classes=6, dim=20, sigma=0.3)
    gram = centres @ centres.T - torch.eye(6, dtype=torch.float64)
    bound = float(gram.square().sum() / 6 + 6 * 0.3**2)
    values = {
        w: float(linear_head(CorrectClassQuadratic(w=w), centres)(points, labels).detach())
        for w in (1.0, 100.0)
    }
    assert values[1.0] < bound < values[100.0]


def test_lemma_3_of_the_tree_loss_fails_for_two_classes():
    """000: two near classes of norm B have ||U|| >= B, and the bound is B / sqrt(2)."""
    w = np.array([[1.0, 0.0], [1.0, 1e-3]])
    u = np.stack([w[0], w[1] - w[0]])
    assert np.linalg.norm(u) > 1 / math.sqrt(2) * 1.0 * math.sqrt(math.log2(2))
