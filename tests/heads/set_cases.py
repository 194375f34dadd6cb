"""Naive float64 definitions of the losses with label sets, one row and one label at a time."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads import ClassHead
from heads.losses import LOSSES, Loss
from heads.tree import LabelTree
from tests.heads.cases import LOGIT_MAPS, facts, label_tree, noise
from tests.heads.test_logits import DIM, counts_of, loss_and_gradients_of

SET_KINDS = tuple(kind for kind, loss in LOSSES.items() if loss.label_sets != "no")
OF_LABELS = tuple(kind for kind in SET_KINDS if LOSSES[kind].label_sets == "labels")
OPTIONS: dict[str, dict[str, Any]] = {
    "ce": {"label_smoothing": 0.1, "z_loss": 0.01},
    "nce": {"t": 7},
    "asymmetric": {"gamma_positive": 1.3, "gamma_negative": 2.5, "margin": 0.2},
}


def set_loss(kind: str, num_classes: int) -> Loss:
    return LOSSES[kind](**OPTIONS.get(kind, {})).prepare(facts(num_classes))


def label_sets(num_classes: int, num_rows: int, seed: int = 0) -> list[list[int]]:
    """The labels of each row: about one in four rows is empty, and others have up to five."""
    rng = np.random.default_rng(seed)
    most = min(5, num_classes)
    sizes = [0 if row % 4 == 1 else int(rng.integers(1, most + 1)) for row in range(num_rows)]
    return [sorted(rng.choice(num_classes, size, replace=False).tolist()) for size in sizes]


# A row's logits [K] and labels, its weight, and the weight of each class -> (sum, divisor).
Term = Callable[[Tensor, list[int], float, list[float]], tuple[Tensor, float]]


def _sigmoid(z: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-z))


def _ce(z: Tensor, labels: list[int], r: float, c: list[float]) -> tuple[Tensor, float]:
    log_p = (z.exp() / z.exp().sum()).log()
    terms = [-0.9 * log_p[y] - 0.1 * log_p.mean() + 0.01 * z.exp().sum().log() ** 2 for y in labels]
    n = len(labels)
    total = sum((r * c[y] / n * term for y, term in zip(labels, terms, strict=True)), 0 * z.sum())
    return total, sum(r * c[y] / n for y in labels)


def _decoupled(z: Tensor, labels: list[int], r: float, c: list[float]) -> tuple[Tensor, float]:
    negatives = sum((z[j].exp() for j in range(len(z)) if j not in labels), 0 * z.sum())
    terms = [-(z[y].exp() / (z[y].exp() + negatives)).log() for y in labels]
    total = sum((r * c[y] * term for y, term in zip(labels, terms, strict=True)), 0 * z.sum())
    return total, sum(r * c[y] / len(labels) for y in labels)


def _bce(z: Tensor, labels: list[int], r: float, c: list[float]) -> tuple[Tensor, float]:
    g = _sigmoid(z)
    return r * sum(-g[j].log() if j in labels else -(1 - g[j]).log() for j in range(len(z))), r


def _nce(z: Tensor, labels: list[int], r: float, c: list[float]) -> tuple[Tensor, float]:
    t, q = 7, noise(len(z))
    g = 1 / (1 + t * q * torch.exp(-z))
    positive = sum((-g[y].log() for y in labels), 0 * z.sum())
    return r * (positive - t * (q * (1 - g).log()).sum()), r


def _asymmetric(z: Tensor, labels: list[int], r: float, c: list[float]) -> tuple[Tensor, float]:
    p = _sigmoid(z)
    q = (p - 0.2).clamp(min=0)
    positive = (-((1 - p[y]) ** 1.3) * p[y].log() for y in labels)
    negative = (-(q[j] ** 2.5) * (1 - q[j]).log() for j in range(len(z)) if j not in labels)
    return r * sum((*positive, *negative), 0 * z.sum()), r


TERMS: dict[str, Term] = {
    "ce": _ce,
    "decoupled_softmax": _decoupled,
    "bce": _bce,
    "nce": _nce,
    "asymmetric": _asymmetric,
}


def naive_set_loss(
    kind: str,
    z: Tensor,
    sets: list[list[int]],
    row_weights: Tensor | None = None,
    class_weights: Tensor | None = None,
) -> Tensor:
    """The loss of logits [m, K]."""
    r = [1.0] * len(z) if row_weights is None else row_weights.tolist()
    c = [1.0] * z.shape[1] if class_weights is None else class_weights.tolist()
    if kind == "batch_ce":
        pairs = [(i, y, r[i] * c[y]) for i, row in enumerate(sets) for y in row if r[i] * c[y]]
        total = sum(w for *_, w in pairs)
        log_q = z - z.flatten().exp().sum().log()
        return sum(
            (w / total * (math.log(w / total) - log_q[i, y]) for i, y, w in pairs), 0 * z.sum()
        )
    found = [TERMS[kind](*row, c) for row in zip(z, sets, r, strict=True)]
    return sum(term for term, _ in found) / (sum(divisor for _, divisor in found) or 1)


Weights = tuple[tuple[float, ...] | None, tuple[float, ...] | None]  # of rows and of classes
ROW_WEIGHTS = (0.2, 1.0, 0.0, 3.0, 0.5, 1.5, 0.7, 1.0, 2.0, 0.0, 1.3)
CLASS_WEIGHTS = (0.0, *np.linspace(0.5, 2, 12).tolist())


def weights_of(kind: str) -> Weights:
    """Weights of 11 rows and, if the loss supports them, of 13 classes."""
    return ROW_WEIGHTS, CLASS_WEIGHTS if kind in OF_LABELS else None


def tensors_of_weights(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The same row weights, and the class weights as options of a head."""
    of_rows, of_classes = weights_of(kind)
    options = {}
    if of_classes is not None:
        options["class_weights"] = torch.tensor(of_classes, dtype=torch.float64)
    return torch.tensor(of_rows, dtype=torch.float64), options


@cache
def expected_with_sets(
    name: str,
    kind: str,
    tree: LabelTree,
    num_rows: int,
    weights: Weights = (None, None),
) -> list[np.ndarray]:
    """The loss and its gradients, as in `loss_and_gradients_of`."""
    sets = label_sets(tree.num_classes, num_rows)
    true = torch.zeros(num_rows, tree.num_classes, dtype=torch.bool)
    for row, labels in enumerate(sets):
        true[row, labels] = True
    of_both = [
        None if each is None else torch.tensor(each, dtype=torch.float64) for each in weights
    ]
    return loss_and_gradients_of(
        name, tree, num_rows, true, lambda z: naive_set_loss(kind, z, sets, *of_both)
    )


def make_set_head(
    name: str, kind: str, weighting: str, num_classes: int, mesh: Any = None, **options: Any
) -> ClassHead:
    return ClassHead(
        DIM,
        label_tree(weighting, num_classes),
        set_loss(kind, num_classes),
        logits=LOGIT_MAPS[name],
        class_counts=counts_of(num_classes),
        mesh=mesh,
        **({"dtype": torch.float64} | options),
    )
