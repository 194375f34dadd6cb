"""Whole head steps (forward + backward, float32) beside their alternatives.

Before any clock runs, the engine's loss and gradients are compared with the naive step's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import Row, ratio_row, take_turns
from heads import ClassHead, HierarchicalSoftmaxHead, LabelTree, build_cover_tree
from heads.losses import LOSSES, CrossEntropy

DIM = 512
_LABEL_DIM = 32

Case = tuple[int, int]  # classes, rows of the batch


@dataclass(frozen=True)
class Step:
    """Forward and backward of a module that maps features [B, d] and labels [B] to a loss; each
    call makes gradients anew, as a training loop does, and adds to none."""

    module: nn.Module
    features: Tensor
    labels: Tensor

    def __call__(self) -> Tensor:
        self.features.grad = None
        self.module.zero_grad(set_to_none=True)
        loss: Tensor = self.module(self.features, self.labels)
        loss.backward()
        return loss.detach()


class LinearCrossEntropy(nn.Module):
    """What one writes without kway."""

    def __init__(self, head: ClassHead) -> None:
        super().__init__()
        assert head.bias is not None
        self.weight = nn.Parameter(head.weight.detach().clone())
        self.bias = nn.Parameter(head.bias.detach().clone())

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(features, self.weight, self.bias), labels)


def trees() -> Iterator[Row]:
    """V-tree `ce` beside dense `ce`."""
    for classes in (10_000, 100_000):
        tree, origin = label_tree(classes)
        for batch, at_most in ((1024, 1.10), (256, 1.25)):
            heads = {
                "vtree": ClassHead(DIM, tree, CrossEntropy()),
                "dense": ClassHead(DIM, classes, CrossEntropy()),
            }
            times = _timed(heads, (classes, batch), f"vtree, {_said(classes, batch)}")
            what = f"vtree step / dense step, {origin}"
            yield ratio_row(what, _said(classes, batch), times["vtree"], times["dense"], at_most)


def engine() -> Iterator[Row]:
    """The engine's `ce` against linear + cross_entropy, with logits that fit the budget or not."""
    for classes, batch, memory_mib, at_most in (
        (100_000, 256, 1024, 1.05),
        (100_000, 256, 256, None),
        (100_000, 1024, 256, None),
        (10_000, 256, 256, None),
    ):
        head = ClassHead(DIM, classes, CrossEntropy(), memory_mib=memory_mib)
        naive = LinearCrossEntropy(head)
        case = f"{_said(classes, batch)}, {memory_mib} MiB"
        features, labels = _inputs((classes, batch))
        agree(Step(naive, features, labels), Step(head, features, labels))
        times = _timed({"ours": head, "naive": naive}, (classes, batch), f"engine, {case}")
        what = "engine ce / linear + cross_entropy"
        yield ratio_row(what, case, times["ours"], times["naive"], at_most)


def frozen() -> Iterator[Row]:
    """The engine's `ce` against linear + cross_entropy, with the same part frozen in both."""
    case = classes, batch = 100_000, 256
    for part, (memory_mib, at_most) in product(
        ("features", "weights"), ((1024, 1.10), (256, None))
    ):
        head = ClassHead(DIM, classes, CrossEntropy(), memory_mib=memory_mib)
        naive = LinearCrossEntropy(head)
        features, labels = _inputs(case)
        features.requires_grad_(part == "weights")
        modules = {"ours": head, "naive": naive}
        for module in modules.values():
            module.requires_grad_(part == "features")
        steps = {name: Step(module, features, labels) for name, module in modules.items()}
        agree(steps["naive"], steps["ours"])
        said = f"{_said(classes, batch)}, {memory_mib} MiB"
        times = take_turns(steps, title=f"frozen {part}, {said}", seconds=40)
        what = f"engine ce / linear + cross_entropy, {part} frozen"
        yield ratio_row(what, said, times["ours"], times["naive"], at_most)


def losses() -> Iterator[Row]:
    """Every loss beside `ce`, dense; simloss with 300-d label vectors."""
    case = classes, batch = 10_000, 256
    most = {"smooth_topk": 1.5, "simloss": 2.2}
    for kind in LOSSES:
        if kind != "ce":
            heads = {
                kind: loss_head(kind, classes, DIM),
                "ce": ClassHead(DIM, classes, CrossEntropy()),
            }
            times = _timed(heads, case, kind, seconds=6)
            yield ratio_row(
                f"{kind} step / ce step",
                _said(classes, batch),
                times[kind],
                times["ce"],
                most.get(kind, 1.2),
            )


def sampled() -> Iterator[Row]:
    """`ce` that computes a tenth of the classes without a row beside all of them."""
    classes, batch = 100_000, 256
    heads = {
        "sampled": ClassHead(DIM, classes, CrossEntropy(sample_rate=0.1)),
        "exact": ClassHead(DIM, classes, CrossEntropy()),
    }
    times = _timed(heads, (classes, batch), "sampled ce")
    what = "ce, sample_rate 0.1 / exact ce"
    yield ratio_row(what, _said(classes, batch), times["sampled"], times["exact"])


def loss_head(kind: str, classes: int, dim: int) -> ClassHead:
    """A dense head of any loss, with random label vectors for simloss; a tree for hierarchical
    softmax."""
    if kind == "hierarchical_softmax":
        return HierarchicalSoftmaxHead(dim, label_tree(classes)[0])
    return ClassHead(
        dim,
        classes,
        LOSSES[kind](),
        class_counts=torch.ones(classes),
        label_vectors=torch.randn(classes, 300) if kind == "simloss" else None,
    )


def agree(naive: Step, ours: Step) -> None:
    """Both sides of a ratio compute the same thing, or the ratio means nothing."""
    found = []
    for step in (naive, ours):
        loss = step()
        by_weight = next(step.module.parameters()).grad
        found.append((loss, step.features.grad, by_weight))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)


@cache
def label_tree(num_classes: int) -> tuple[LabelTree, str]:
    """A V-tree over random clustered label vectors, and its story."""
    vectors = _clustered_vectors(num_classes, np.random.default_rng(0))
    tree = build_cover_tree(vectors).vtree()
    return tree, f"cover tree of {tree.num_nodes:,} nodes on {tree.depth.max() + 1} levels"


def _inputs(case: Case) -> tuple[Tensor, Tensor]:
    classes, batch = case
    return torch.randn(batch, DIM, requires_grad=True), torch.randint(classes, (batch,))


def _timed(
    modules: dict[str, nn.Module] | dict[str, ClassHead],
    case: Case,
    title: str,
    seconds: float = 40,
) -> dict[str, np.ndarray]:
    features, labels = _inputs(case)
    steps = {name: Step(module, features, labels) for name, module in modules.items()}
    return take_turns(steps, title=title, seconds=seconds)


def _said(classes: int, batch: int) -> str:
    return f"K = {classes:,}, B = {batch:,}"


def _clustered_vectors(num_classes: int, rng: np.random.Generator) -> np.ndarray:
    """Gaussian clusters within clusters: ten times smaller and about ten times as many a level."""
    vectors = np.zeros((1, _LABEL_DIM))
    width = 1.0
    while len(vectors) < num_classes:
        size = min(10 * len(vectors), num_classes)
        parents = vectors[rng.integers(len(vectors), size=size)]
        vectors = parents + width * rng.normal(size=parents.shape)
        width /= 3
    return vectors
