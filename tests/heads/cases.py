"""Naive float64 reference implementations of the losses and class weights."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD

from heads import ArcFace, ClassHead, CosFace, Cosine, Dot, NormFace, SphereFace
from heads.logit_maps import LogitMap
from heads.losses import LOSSES, ClassFacts, Loss
from heads.tree import LabelTree, build_cover_tree

WEIGHTINGS = ("dense", "utree", "vtree")
_LEARNED = {"learn_scale": True, "learn_offset": True}
LOGIT_MAPS: dict[str, LogitMap] = {
    "dot": Dot(scale=1.7, offset=-0.4, prior=0.7, **_LEARNED),
    "normface": NormFace(scale=3),
    "sphereface": SphereFace(scale=2, m1=4),  # angles up to 4 pi
    "cosface": CosFace(scale=3, prior=1.3),
    "arcface": ArcFace(scale=3),
    "cosine": Cosine(scale=2, offset=0.3, m1=1.2, m2=0.9, m3=0.2, prior=0.5, **_LEARNED),
}


@cache
def label_tree(weighting: str, num_classes: int) -> LabelTree:
    """A cover tree of clustered vectors, deep enough that paths cross shards."""
    rng = np.random.default_rng(num_classes)
    centers = rng.normal(size=(3, 6))
    vectors = centers[rng.integers(3, size=num_classes)] + 0.4 * rng.normal(size=(num_classes, 6))
    match weighting:
        case "dense":
            return LabelTree.dense(num_classes)
        case "utree":
            return build_cover_tree(vectors).utree()
        case _:
            return build_cover_tree(vectors).vtree()


def problem(tree: LabelTree, num_rows: int, dim: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Features [B, dim], labels [B] and node vectors [N, dim + 1], all float64."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_rows, dim, generator=generator, dtype=torch.float64)
    labels = torch.randint(tree.num_classes, (num_rows,), generator=generator)
    # Small values, so that the naive log(1 - sigmoid(z)) does not lose precision.
    nodes = 0.3 * torch.randn(tree.num_nodes, dim + 1, generator=generator, dtype=torch.float64)
    return features, labels, nodes


def set_nodes(head: ClassHead, nodes: Tensor) -> None:
    """Set this rank's rows to its part of `nodes` [N, dim], or rows and bias from [N, dim + 1]."""
    held = nodes[head.engine.weights.start : head.engine.weights.stop]
    with torch.no_grad():
        head.weight.copy_(held[:, : head.dim])
        if head.bias is not None:
            head.bias.copy_(held[:, head.dim])


def share(num_rows: int) -> slice:
    """The rows of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return slice(num_rows * rank // world, num_rows * (rank + 1) // world)


def gradient_of_nodes(head: ClassHead) -> Tensor:
    """The gradient of this rank's rows [n, dim], with the bias's gradient as the last column."""
    if head.bias is None:
        return head.weight.grad
    return torch.cat([head.weight.grad, head.bias.grad[:, None]], dim=1)


def loss_and_gradients(
    head: ClassHead, features: Tensor, labels: Tensor
) -> tuple[float, np.ndarray, np.ndarray]:
    """The loss of a step and its gradients with respect to features and this rank's rows."""
    features = features.clone().requires_grad_()
    loss = head(features, labels)
    loss.backward()
    return float(loss.detach()), features.grad.numpy(), gradient_of_nodes(head).numpy()


def sgd(head: ClassHead, lr: float, *, weight_decay: float = 0.0, momentum: float = 0.0) -> SGD:
    """SGD with the learning rates of the head. The scale and the offset do not decay."""
    rates = head.sgd_rates()
    groups = [
        {
            "params": [parameter],
            "lr": lr * rates[name],
            "weight_decay": weight_decay if parameter.ndim else 0.0,
        }
        for name, parameter in head.named_parameters()
    ]
    return SGD(groups, momentum=momentum)


def naive_rows(tree: LabelTree, nodes: Tensor) -> Tensor:
    """The rows of all classes [K, ...], computed as sums over their paths, one path at a time (Eq.
    3 of paper 000)."""
    rows = []
    for class_id in range(tree.num_classes):
        node = int(np.flatnonzero(tree.class_of_node == class_id)[0])
        row = torch.zeros(nodes.shape[1], dtype=nodes.dtype)
        while node >= 0:
            row = row + nodes[node]
            node = int(tree.parent[node])
        rows.append(row)
    return torch.stack(rows)


def naive_logits(tree: LabelTree, features: Tensor, nodes: Tensor) -> Tensor:
    """z_ij = x_i . w_j + b_j, for nodes [N, dim + 1] with the bias in the last column."""
    rows = naive_rows(tree, nodes)
    return features @ rows[:, :-1].T + rows[:, -1]


def label_vectors(num_classes: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_classes)
    return torch.randn(num_classes, 4, generator=generator, dtype=torch.float64)


def noise(num_classes: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_classes)
    counts = 0.1 + torch.rand(num_classes, generator=generator, dtype=torch.float64)
    return counts / counts.sum()


def make_loss(kind: str, num_classes: int) -> Loss:
    """The loss with hyperparameters that differ from the defaults."""
    options: dict[str, Any] = {
        "ce": {"label_smoothing": 0.1, "z_loss": 0.01},
        "self_norm": {"alpha": 0.3},
        "max_margin": {"gamma": 0.7},
        "batch_max_margin": {"gamma": 0.7},
        "nce": {"t": 7},
        "topk_hinge": {"k": min(3, num_classes - 1), "alpha": 0.8},
        "smooth_topk": {"k": min(2, num_classes - 1), "tau": 0.6, "alpha": 0.8},
        "ccql": {"w": 1.5},
        "spherical_softmax": {"eps": 0.05},
        "spherical_bound": {"xi": 1.3},
        "simloss": {"lower": 0.1},
    }.get(kind, {})
    return LOSSES[kind](**options).prepare(facts(num_classes))


def facts(num_classes: int) -> ClassFacts:
    """The class facts that losses need, with `noise` as the class counts."""
    return ClassFacts(num_classes, noise(num_classes), label_vectors(num_classes))


def _mean(term: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean over rows of a function of one row's logits [K] and label."""
    return lambda z, labels: torch.stack(
        [term(row, y) for row, y in zip(z, labels.tolist(), strict=True)]
    ).mean()


def _softmax(z: Tensor) -> Tensor:
    return z.exp() / z.exp().sum()


def _sigmoid(z: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-z))


def _false(z: Tensor, y: int) -> Tensor:
    return torch.cat([z[:y], z[y + 1 :]])


def _onehot(z: Tensor, y: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(y), len(z)).to(z.dtype)


def _ce(z: Tensor, y: int) -> Tensor:
    target = 0.9 * _onehot(z, y) + 0.1 / len(z)
    return -(target * _softmax(z).log()).sum() + 0.01 * z.exp().sum().log() ** 2


def _batch_ce(z: Tensor, labels: Tensor) -> Tensor:
    m = len(z)
    q = z.exp() / z.exp().sum()
    return sum(1 / m * torch.log(1 / m / q[i, labels[i]]) for i in range(m))


def _margin(z: Tensor, y: int) -> Tensor:
    false = _false(z, y)
    largest = false.max() if len(false) else torch.tensor(-torch.inf, dtype=z.dtype)
    return (0.7 - z[y] + largest).clamp(min=0)


def _batch_margin(z: Tensor, labels: Tensor) -> Tensor:
    rows = list(zip(z, labels.tolist(), strict=True))
    lowest = torch.stack([row[y] for row, y in rows]).min()
    false = torch.cat([_false(row, y) for row, y in rows])
    highest = false.max() if len(false) else torch.tensor(-torch.inf, dtype=z.dtype)
    return (0.7 - lowest + highest).clamp(min=0) / len(z) + _mean(_margin)(z, labels)


def _nce(z: Tensor, y: int) -> Tensor:
    t, q = 7, noise(len(z))
    g = 1 / (1 + t * q * torch.exp(-z))
    return -g[y].log() - t * (q * (1 - g).log()).sum()


def _bce(z: Tensor, y: int) -> Tensor:
    g = _sigmoid(z)
    return -g[y].log() - (1 - _false(g, y)).log().sum()


def _tanimoto(p: Tensor, y: int) -> Tensor:
    f = _onehot(p, y)
    return -(f @ p) / (f.norm() + p.norm() - f @ p)


@cache
def _tuples(num_classes: int, k: int) -> Tensor:
    """All sets of k classes, as a tensor [n, k]."""
    return torch.combinations(torch.arange(num_classes), k)


def _topk_hinge(z: Tensor, y: int) -> Tensor:
    """Eq. 8 of paper 003 over all k-tuples, with scores divided by k."""
    k = min(3, len(z) - 1)
    tuples = _tuples(len(z), k)
    means = z[tuples].sum(1) / k
    has_y = (tuples == y).any(1)
    return (means + 0.8 * (~has_y).to(z.dtype)).max() - means[has_y].max()


def _smooth_topk(z: Tensor, y: int) -> Tensor:
    """Eq. 9 of paper 003 over all k-tuples."""
    k, tau = min(2, len(z) - 1), 0.6
    tuples = _tuples(len(z), k)
    means = z[tuples].sum(1) / k
    has_y = (tuples == y).any(1)
    every = torch.exp((means + 0.8 * (~has_y).to(z.dtype)) / tau).sum()
    return tau * every.log() - tau * torch.exp(means[has_y] / tau).sum().log()


def _bound(z: Tensor, y: int) -> Tensor:
    """Bouchard's bound at the alpha that minimizes it, where the derivative vanishes."""
    xi, num = 1.3, len(z)
    curvature = (1 / (1 + math.exp(-xi)) - 0.5) / (2 * xi)
    alpha = (z.sum() * 2 * curvature + num / 2 - 1) / (2 * curvature * num)
    terms = (z - alpha - xi) / 2 + curvature * ((z - alpha) ** 2 - xi**2)
    return alpha + (terms + math.log(1 + math.exp(xi))).sum() - z[y]


def _simloss(z: Tensor, y: int) -> Tensor:
    v = label_vectors(len(z))
    cosine = (v @ v[y]) / (v.norm(dim=1) * v[y].norm())
    return -(((cosine - 0.1) / 0.9).clamp(min=0) @ _softmax(z)).log()


NAIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ce": _mean(_ce),
    "batch_ce": _batch_ce,
    "max_margin": _mean(_margin),
    "batch_max_margin": _batch_margin,
    "self_norm": _mean(lambda z, y: -_softmax(z)[y].log() + 0.3 * z.exp().sum().log() ** 2),
    "nce": _mean(_nce),
    "bce": _mean(_bce),
    "softmax_cs": _mean(lambda z, y: -(_softmax(z)[y] / _softmax(z).norm()).log()),
    "sigmoid_cs": _mean(lambda z, y: -(_sigmoid(z)[y] / _sigmoid(z).norm()).log()),
    "softmax_tanimoto": _mean(lambda z, y: _tanimoto(_softmax(z), y)),
    "sigmoid_tanimoto": _mean(lambda z, y: _tanimoto(_sigmoid(z), y)),
    "topk_hinge": _mean(_topk_hinge),
    "smooth_topk": _mean(_smooth_topk),
    "quadratic": _mean(lambda z, y: (_onehot(z, y) - z).square().sum() / 2),
    "ccql": _mean(lambda z, y: (_onehot(z, y) - z).square().sum() / 2 + 1.5 / 2 * (1 - z[y]) ** 2),
    "taylor_softmax": _mean(
        lambda z, y: -((1 + z[y] + z[y] ** 2 / 2) / (1 + z + z**2 / 2).sum()).log()
    ),
    "spherical_softmax": _mean(lambda z, y: -((z[y] ** 2 + 0.05) / (z**2 + 0.05).sum()).log()),
    "spherical_bound": _mean(_bound),
    "simloss": _mean(_simloss),
}


# Hierarchical softmax has its own head, which test_hierarchical.py tests.
LOSS_KINDS = tuple(NAIVE)


def naive_loss_and_gradients(
    kind: str, tree: LabelTree, features: Tensor, labels: Tensor, nodes: Tensor
) -> tuple[float, np.ndarray, np.ndarray]:
    """The loss and its gradients with respect to features [B, dim] and nodes [N, dim + 1]."""
    features, nodes = features.clone().requires_grad_(), nodes.clone().requires_grad_()
    loss = NAIVE[kind](naive_logits(tree, features, nodes), labels)
    loss.backward()
    assert torch.isfinite(loss)
    return float(loss.detach()), features.grad.numpy(), nodes.grad.numpy()
