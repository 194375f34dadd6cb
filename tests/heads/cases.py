"""Losses x weightings against their definitions in float64, written out naively."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from heads.losses import LOSSES
from heads.tree import LabelTree, build_cover_tree

WEIGHTINGS = ("dense", "utree", "vtree")
LOSS_KINDS = tuple(LOSSES)


def label_tree(weighting: str, num_classes: int) -> LabelTree:
    """A cover tree of clustered vectors, deep enough to have paths that cross shards."""
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
    # Small enough that the naive log(1 - sigmoid(z)) keeps its digits.
    nodes = 0.3 * torch.randn(tree.num_nodes, dim + 1, generator=generator, dtype=torch.float64)
    return features, labels, nodes


def naive_logits(tree: LabelTree, features: Tensor, nodes: Tensor) -> Tensor:
    """z_ij = x_i . (sum of the node vectors on class j's path), one path at a time (000, eq 3)."""
    x = torch.cat([features, torch.ones(len(features), 1, dtype=features.dtype)], 1)
    rows = []
    for class_id in range(tree.num_classes):
        node = int(np.flatnonzero(tree.class_of_node == class_id)[0])
        row = torch.zeros(nodes.shape[1], dtype=nodes.dtype)
        while node >= 0:
            row = row + nodes[node]
            node = int(tree.parent[node])
        rows.append(row)
    return x @ torch.stack(rows).T


def _cross_entropy(z: Tensor, labels: Tensor) -> Tensor:
    p = z.exp() / z.exp().sum(1, keepdim=True)
    return -p[torch.arange(len(z)), labels].log().mean()


def _batch_cross_entropy(z: Tensor, labels: Tensor) -> Tensor:
    m = len(z)
    q = z.exp() / z.exp().sum()
    return sum(1 / m * torch.log(1 / m / q[i, labels[i]]) for i in range(m))


def _binary_cross_entropy(z: Tensor, labels: Tensor) -> Tensor:
    total = torch.zeros((), dtype=z.dtype)
    for i, y in enumerate(labels.tolist()):
        for j in range(z.shape[1]):
            g = 1 / (1 + torch.exp(-z[i, j]))
            total = total - (torch.log(g) if j == y else torch.log(1 - g))
    return total / len(z)


NAIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ce": _cross_entropy,
    "batch_ce": _batch_cross_entropy,
    "bce": _binary_cross_entropy,
}


def naive_loss_and_gradients(
    kind: str, tree: LabelTree, features: Tensor, labels: Tensor, nodes: Tensor
) -> tuple[float, np.ndarray, np.ndarray]:
    """The loss, its gradient by features [B, dim] and by node vectors [N, dim + 1]."""
    features, nodes = features.clone().requires_grad_(), nodes.clone().requires_grad_()
    loss = NAIVE[kind](naive_logits(tree, features, nodes), labels)
    loss.backward()
    assert torch.isfinite(loss)
    return float(loss.detach()), features.grad.numpy(), nodes.grad.numpy()
