"""A vectorized simulation of paper 000's synthetic experiments (6.1): many draws and many learning
rates of a head are trained at the same time, one sample after the other.

The class weights of a tree loss are `W = P V`, where `P` [k, N] counts how often each of the N node
vectors occurs on the path of each class. The gradient of V is `P^T G`, where G [k, d] is the
gradient of W. If V starts at V0, every step of SGD, with or without momentum and weight decay,
therefore keeps V in the form `a V0 + P^T A`, and W in the form `a P V0 + M A` with `M = P P^T`
[k, k]. The simulation stores the scalar a and A [k, d]. The number of nodes does not matter, and
cross entropy is the case M = 1. `tests/papers/test_tree_simulation.py` compares it with ClassHead.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from heads.tree import CoverTree, LabelTree, build_cover_tree

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Regime:
    """n training samples of k classes in d dimensions, x ~ N(w_y, sigma^2) (Eq. 17 to 19).

    `rank`: None draws independent entries of W*, as the text does; otherwise W* is the product of
    [k, rank] and [rank, d] matrices with standard normal entries, as in the authors' code with rank
    5. `epsilon`: the tree is built from (1 - epsilon) W* + epsilon W', where W' is an independent
    draw (Eq. 21).
    """

    n: int = 100
    d: int = 64
    k: int = 10
    sigma: float = 1.0
    rank: int | None = None
    epsilon: float = 0.0


@dataclass(frozen=True)
class Protocol:
    """One pass of SGD. `random_start`: node vectors start as in `torch.nn.Linear`, uniform in
    +-1/sqrt(d), instead of at zero. `averaged`: test the average of the weights before each step
    instead of the last weights. `batch`: samples per step."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    random_start: bool = False
    averaged: bool = False
    batch: int = 1


# The paper's text names no optimizer. Its theory (Lemma 1) is about plain SGD from zero with
# averaged weights.
TEXT = Protocol(averaged=True)
# run_exp.py in cora1021/TreeLoss. Its learning rate schedule is never stepped.
AUTHORS = Protocol(momentum=0.9, weight_decay=3e-4, random_start=True)
# base_exp.py, with which Figure 4 was made, takes steps on 1,000 samples.
AUTHORS_BASES = Protocol(momentum=0.9, weight_decay=3e-4, random_start=True, batch=1000)
AUTHORS_RATE = 1e-4


@dataclass(frozen=True)
class Draws:
    """D draws of a regime: W* [D, k, d], the vectors of the metric, and the samples."""

    true: torch.Tensor
    vectors: FloatArray
    features: torch.Tensor
    labels: torch.Tensor
    test_features: torch.Tensor
    test_labels: torch.Tensor


def draw(regime: Regime, seeds: Sequence[int], *, tests: int) -> Draws:
    """Return one draw per seed. W* does not depend on n, sigma and epsilon."""
    parts = [_draw_one(regime, seed, tests) for seed in seeds]
    true, vectors, *samples = (np.stack(of_all) for of_all in zip(*parts, strict=True))
    features, labels, test_features, test_labels = map(torch.from_numpy, samples)
    return Draws(
        torch.from_numpy(true).float(), vectors, features, labels, test_features, test_labels
    )


def _draw_one(regime: Regime, seed: int, tests: int) -> tuple[NDArray[np.generic], ...]:
    shape = regime.k, regime.d

    def generator(which: int) -> np.random.Generator:
        return np.random.default_rng([seed, *shape, regime.rank or 0, which])

    def weights(which: int) -> FloatArray:
        rng = generator(which)
        if regime.rank is None:
            return rng.normal(size=shape)
        return rng.normal(size=(regime.k, regime.rank)) @ rng.normal(size=(regime.rank, regime.d))

    true, other = weights(0), weights(1)

    def samples(number: int, which: int) -> tuple[NDArray[np.generic], ...]:
        rng = generator(which)
        labels = rng.integers(regime.k, size=number)
        noise = rng.normal(size=(number, regime.d))
        return (true[labels] + regime.sigma * noise).astype(np.float32), labels

    vectors = (1 - regime.epsilon) * true + regime.epsilon * other
    return true, vectors, *samples(regime.n, 2), *samples(tests, 3)


def path_counts(kind: str, vectors: FloatArray, base: float) -> FloatArray:
    """Return P [k, N] for one draw.

    `ce`: the identity. `vtree`: kway's V-tree. `chains`: the V-tree with a pseudoclass for each
    class and level, which keeps pseudoclasses with a single child. `authors`: as `chains`, but all
    pseudoclasses with the same center share one vector, as in the authors' code.
    """
    if kind == "ce":
        return np.eye(len(vectors))
    cover = build_cover_tree(vectors, base=base, metric="euclidean")
    match kind:
        case "vtree":
            return _counts(cover.vtree())
        case "chains":
            return _counts(chained_vtree(cover))
        case "authors":
            chained, num_classes = _chained(cover), len(vectors)
            counts = np.zeros((num_classes, 2 * num_classes))
            for row in range(num_classes):
                counts[row, row] = 1
                for center, _ in chained[row]:
                    counts[row, num_classes + center] += 1
            return counts
    raise ValueError(f"unknown tree {kind!r}: use ce, vtree, chains or authors")


def _counts(tree: LabelTree) -> FloatArray:
    counts = np.zeros((tree.num_classes, tree.num_nodes))
    for row, node in enumerate(tree.node_of_class):
        counts[row, [node, *tree.ancestors(int(node))]] = 1
    return counts


def _chained(cover: CoverTree) -> list[list[tuple[int, int]]]:
    """Return the pseudoclasses (center, level) above each class, from the deepest level up.

    Every class is at the center of a pseudoclass on each level from its own to the deepest one.
    """
    deepest = int(cover.level.max())
    paths = []
    for row in range(len(cover.level)):
        path, center = [], row
        for level in range(deepest, -1, -1):
            if level < cover.level[center]:
                center = int(cover.center_parent[center])
            path.append((center, level))
        paths.append(path)
    return paths


def chained_vtree(cover: CoverTree) -> LabelTree:
    """Return the V-tree that has a pseudoclass for each class and level."""
    paths, num_classes = _chained(cover), len(cover.level)
    nodes = {node: num_classes + i for i, node in enumerate(sorted({n for p in paths for n in p}))}
    parents = np.full(num_classes + len(nodes), -1)
    for row, path in enumerate(paths):
        parents[row] = nodes[path[0]]
        for below, above in itertools.pairwise(path):
            parents[nodes[below]] = nodes[above]
    return LabelTree.from_parents(parents, [*range(num_classes), *[-1] * len(nodes)])


@dataclass(frozen=True)
class Trained:
    """The test accuracy and the Frobenius norm of V for each draw and rate [D, R]."""

    accuracy: torch.Tensor
    norm: torch.Tensor


def train(
    draws: Draws,
    counts: Sequence[FloatArray],
    rates: Sequence[float],
    protocol: Protocol,
    *,
    similarity: torch.Tensor | None = None,
) -> Trained:
    """Train one head per draw and rate.

    counts: P of each draw. similarity: [D, k, k], to train with SimLoss instead of cross entropy.
    """
    dtype = draws.features.dtype
    num_draws, num_samples, dim = draws.features.shape
    num_classes, num_rates = draws.true.shape[1], len(rates)
    starts = [_start(of_draw.shape[1], dim, protocol, i) for i, of_draw in enumerate(counts)]
    start = torch.stack(
        [torch.from_numpy(c) @ first for c, first in zip(counts, starts, strict=True)]
    ).to(dtype)
    mix = _mixing(torch.stack([torch.from_numpy(c @ c.T) for c in counts]).to(dtype))
    sgd = _Sgd(num_draws, num_classes, rates, dim, protocol, dtype)
    for first in range(0, num_samples, protocol.batch):
        x = draws.features[:, first : first + protocol.batch]
        y = draws.labels[:, first : first + protocol.batch]
        logits = mix(sgd.products(x)) + (start @ x.mT)[:, :, None] * sgd.scale[:, None]
        probabilities = torch.softmax(logits, 1)  # [D, k, R, b]
        if similarity is None:
            target = torch.nn.functional.one_hot(y, num_classes).mT[:, :, None]
        else:
            rows = similarity.gather(1, y[..., None].expand(-1, -1, num_classes))
            weighted = probabilities * rows.mT[:, :, None]
            target = weighted / weighted.sum(1, keepdim=True)
        sgd.step(probabilities - target, x)
    moved, scale = sgd.result()
    weight = mix(moved) + scale[:, None] * start[:, :, None]
    norms = torch.empty(num_draws, num_rates, dtype=torch.float64)
    for i, (of_draw, first_nodes) in enumerate(zip(counts, starts, strict=True)):
        nodes = torch.einsum("kn,krj->rnj", torch.from_numpy(of_draw), moved[i].double())
        norms[i] = (nodes + scale[:, None, None].double() * first_nodes).flatten(1).norm(dim=1)
    return Trained(_accuracy(lambda i, r, x: x @ weight[i, :, r].T, draws, num_rates), norms)


class _Sgd:
    """SGD for matrices `scale * start + moved`. moved: [D, rows, R, d], so that one matrix product
    for each draw serves all rates; scale: [R]."""

    def __init__(
        self,
        num_draws: int,
        num_rows: int,
        rates: Sequence[float],
        dim: int,
        protocol: Protocol,
        dtype: torch.dtype,
    ) -> None:
        self.protocol = protocol
        self.rates = torch.tensor(rates, dtype=dtype)
        self.scale, self.scale_velocity = torch.ones_like(self.rates), torch.zeros_like(self.rates)
        self.moved = torch.zeros(num_draws, num_rows, len(rates), dim, dtype=dtype)
        self.velocity = torch.zeros_like(self.moved) if protocol.momentum else None
        self.total, self.total_scale = torch.zeros_like(self.moved), torch.zeros_like(self.rates)
        self.steps = 0

    def products(self, x: torch.Tensor) -> torch.Tensor:
        """Return the products of `moved` with the samples [D, b, d] as [D, rows, R, b]."""
        return (self.moved.flatten(1, 2) @ x.mT).unflatten(1, self.moved.shape[1:3])

    def step(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Update with the mean of residual [D, rows, R, b] times x [D, b, d] over samples."""
        if self.protocol.averaged:
            self.total += self.moved
            self.total_scale += self.scale
            self.steps += 1
        residual = residual / x.shape[1]
        momentum, decay = self.protocol.momentum, self.protocol.weight_decay
        if self.velocity is None:
            residual = residual * -self.rates[:, None]
            self.moved.flatten(1, 2).baddbmm_(residual.flatten(1, 2), x)
            return
        self.velocity.mul_(momentum).add_(self.moved, alpha=decay)
        self.velocity.flatten(1, 2).baddbmm_(residual.flatten(1, 2), x)
        self.moved.addcmul_(self.velocity, -self.rates[:, None])
        self.scale_velocity = momentum * self.scale_velocity + decay * self.scale
        self.scale = self.scale - self.rates * self.scale_velocity

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `moved` and `scale` of the weights to test."""
        if self.protocol.averaged:
            return self.total / self.steps, self.total_scale / self.steps
        return self.moved, self.scale


def train_hierarchical(
    draws: Draws, trees: Sequence[LabelTree], rates: Sequence[float], protocol: Protocol
) -> Trained:
    """Train hierarchical softmax (Morin and Bengio 2005) with a vector per node, draw and rate.

    Each step updates the children of every node on the path to the true class.
    """
    num_draws, num_samples, dim = draws.features.shape
    num_classes, num_nodes = draws.true.shape[1], max(tree.num_nodes for tree in trees)
    # A node's group is its parent, so its siblings have the same group; N is the group of roots.
    # Padding nodes have a group of their own and are on no path.
    group = torch.full((num_draws, num_nodes), num_nodes + 1)
    on_path = torch.zeros(num_draws, num_classes, num_nodes, dtype=draws.features.dtype)
    starts = torch.zeros(num_draws, num_nodes, dim, dtype=draws.features.dtype)
    for i, tree in enumerate(trees):
        parent = torch.from_numpy(tree.parent.copy())
        group[i, : tree.num_nodes] = torch.where(parent < 0, num_nodes, parent)
        on_path[i, :, : tree.num_nodes] = torch.from_numpy(_counts(tree))
        starts[i, : tree.num_nodes] = _start(tree.num_nodes, dim, protocol, i)
    # The groups of the nodes on the path to each class.
    in_groups = torch.zeros(num_draws, num_classes, num_nodes + 2, dtype=on_path.dtype)
    in_groups.scatter_reduce_(2, group[:, None].expand_as(on_path), on_path, "amax")
    updated = in_groups.gather(2, group[:, None].expand_as(on_path))
    sgd = _Sgd(num_draws, num_nodes, rates, dim, protocol, draws.features.dtype)

    def log_probabilities(logits: torch.Tensor, of_draws: torch.Tensor) -> torch.Tensor:
        """Return the log-softmax of logits [D, N, M] over siblings."""
        index = of_draws[..., None].expand_as(logits)
        shape = (len(logits), num_nodes + 2, logits.shape[2])
        top = logits.new_full(shape, -torch.inf).scatter_reduce(1, index, logits, "amax")
        shifted = logits - top.gather(1, index)
        total = logits.new_zeros(shape).scatter_add(1, index, shifted.exp())
        return shifted - total.gather(1, index).log()

    rows = torch.arange(num_draws)
    for step in range(num_samples):
        x, y = draws.features[:, step : step + 1], draws.labels[:, step]
        logits = sgd.products(x)[..., 0] + (starts @ x.mT) * sgd.scale
        residual = log_probabilities(logits, group).exp() - on_path[rows, y][..., None]
        sgd.step((residual * updated[rows, y][..., None])[..., None], x)
    moved, scale = sgd.result()
    nodes = moved + scale[:, None] * starts[:, :, None]

    def scores(i: int, rate: int, x: torch.Tensor) -> torch.Tensor:
        of_nodes = log_probabilities((nodes[i, :, rate] @ x.T)[None], group[i : i + 1])[0]
        return (on_path[i] @ of_nodes).T

    real = on_path.amax(1)[..., None, None]
    return Trained(_accuracy(scores, draws, len(rates)), (nodes * real).square().sum((1, 3)).sqrt())


def _mixing(gram: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the product with M along the classes. For cross entropy, M is the identity."""
    if bool((gram == torch.eye(gram.shape[1], dtype=gram.dtype)).all()):
        return lambda values: values
    return lambda values: (gram @ values.flatten(2)).view_as(values)


def _start(num_nodes: int, dim: int, protocol: Protocol, draw: int) -> torch.Tensor:
    """Return the node vectors before the first step [N, d] in float64."""
    if not protocol.random_start:
        return torch.zeros(num_nodes, dim, dtype=torch.float64)
    bound = dim**-0.5
    return torch.from_numpy(
        np.random.default_rng([draw, num_nodes]).uniform(-bound, bound, (num_nodes, dim))
    )


def _accuracy(
    scores: Callable[[int, int, torch.Tensor], torch.Tensor], draws: Draws, num_rates: int
) -> torch.Tensor:
    """Return the test accuracy [D, R]. scores(draw, rate, features) returns [samples, k]."""
    found = torch.empty(len(draws.true), num_rates)
    for i, (features, labels) in enumerate(
        zip(draws.test_features, draws.test_labels, strict=True)
    ):
        for rate in range(num_rates):
            chosen = scores(i, rate, features).argmax(1)
            found[i, rate] = (chosen == labels).float().mean()
    return found


def similarities(draws: Draws) -> torch.Tensor:
    """Return SimLoss's similarities [D, k, k] between classes, max(0, cosine)."""
    unit = draws.vectors / np.linalg.norm(draws.vectors, axis=2, keepdims=True)
    return torch.from_numpy(np.maximum(0, unit @ unit.swapaxes(1, 2))).to(draws.features.dtype)
