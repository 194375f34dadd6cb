"""Complete head steps (forward + backward, float32) compared with alternatives.

Before the timing, the engine's loss and gradients are compared with those of the naive step.
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
from heads.engine.block_size import CPU_MEMORY_MIB
from heads.losses import LOSSES, CrossEntropy

DIM = 512
_LABEL_DIM = 32

Case = tuple[int, int]  # classes, rows of the batch
# Classes, rows of the batch, memory budget in MiB, and the target of `engine`.
ENGINE_CASES = (
    (1_000, 256, CPU_MEMORY_MIB, 1.15),
    (10_000, 256, CPU_MEMORY_MIB, 1.10),
    (100_000, 256, CPU_MEMORY_MIB, 1.05),
    (100_000, 256, 128, None),
    (100_000, 1024, CPU_MEMORY_MIB, None),
)


@dataclass(frozen=True)
class Step:
    """Forward and backward of a module that maps features [B, d] and labels [B] to a loss.

    Gradients are not accumulated over calls, as in a training loop.
    """

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
    """The code that users would write without kway."""

    def __init__(self, head: ClassHead) -> None:
        super().__init__()
        assert head.bias is not None
        self.weight = nn.Parameter(head.weight.detach().clone())
        self.bias = nn.Parameter(head.bias.detach().clone())

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(features, self.weight, self.bias), labels)


def trees() -> Iterator[Row]:
    """Compare `ce` on a V-tree with dense `ce`."""
    for classes in (10_000, 100_000):
        tree, origin = label_tree(classes)
        for batch, at_most in ((1024, 1.10), (256, 1.25)):
            heads = {
                "vtree": ClassHead(DIM, tree, CrossEntropy()),
                "dense": ClassHead(DIM, classes, CrossEntropy()),
            }
            times = _timed(heads, (classes, batch), f"vtree, {_case_text(classes, batch)}")
            what = f"vtree step / dense step, {origin}"
            yield ratio_row(
                what, _case_text(classes, batch), times["vtree"], times["dense"], at_most
            )


def engine() -> Iterator[Row]:
    """Compare the engine's `ce` with linear + cross_entropy, with and without enough memory for all
    logits."""
    for classes, batch, memory_mib, at_most in ENGINE_CASES:
        head = ClassHead(DIM, classes, CrossEntropy(), memory_mib=memory_mib)
        naive = LinearCrossEntropy(head)
        case = f"{_case_text(classes, batch)}, {memory_mib} MiB"
        features, labels = _inputs((classes, batch))
        agree(Step(naive, features, labels), Step(head, features, labels))
        rounds = 99 if classes < 10_000 else 9  # short steps vary more
        times = _timed(
            {"ours": head, "naive": naive}, (classes, batch), f"engine, {case}", rounds=rounds
        )
        what = "engine ce / linear + cross_entropy"
        yield ratio_row(what, case, times["ours"], times["naive"], at_most)


def frozen() -> Iterator[Row]:
    """Compare the engine's `ce` with linear + cross_entropy, with the same part frozen in both."""
    case = classes, batch = 100_000, 256
    for part, (memory_mib, at_most) in product(
        ("features", "weights"), ((CPU_MEMORY_MIB, 1.05), (128, None))
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
        label = f"{_case_text(classes, batch)}, {memory_mib} MiB"
        times = take_turns(steps, title=f"frozen {part}, {label}", seconds=40)
        what = f"engine ce / linear + cross_entropy, {part} frozen"
        yield ratio_row(what, label, times["ours"], times["naive"], at_most)


def losses() -> Iterator[Row]:
    """Compare every loss with `ce` on dense weights. simloss uses 300-dimensional label vectors."""
    case = classes, batch = 10_000, 256
    targets = {"smooth_topk": 1.5, "simloss": 2.2}
    for kind in LOSSES:
        if kind != "ce":
            heads = {
                kind: loss_head(kind, classes, DIM),
                "ce": ClassHead(DIM, classes, CrossEntropy()),
            }
            times = _timed(heads, case, kind, seconds=6)
            yield ratio_row(
                f"{kind} step / ce step",
                _case_text(classes, batch),
                times[kind],
                times["ce"],
                targets.get(kind, 1.2),
            )


def sampled() -> Iterator[Row]:
    """Compare `ce` that samples 10% of the classes absent from the batch with exact `ce`."""
    classes, batch = 100_000, 256
    heads = {
        "sampled": ClassHead(DIM, classes, CrossEntropy(sample_rate=0.1)),
        "exact": ClassHead(DIM, classes, CrossEntropy()),
    }
    times = _timed(heads, (classes, batch), "sampled ce")
    what = "ce, sample_rate 0.1 / exact ce"
    yield ratio_row(what, _case_text(classes, batch), times["sampled"], times["exact"])


def loss_head(kind: str, classes: int, dim: int) -> ClassHead:
    """Return a dense head with any loss. simloss gets random label vectors.

    Hierarchical softmax gets a tree instead of dense weights.
    """
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
    """Check that both steps compute the same loss and gradients."""
    found = []
    for step in (naive, ours):
        loss = step()
        by_weight = next(step.module.parameters()).grad
        found.append((loss, step.features.grad, by_weight))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)


@cache
def label_tree(num_classes: int) -> tuple[LabelTree, str]:
    """Return a V-tree over random clustered label vectors, and its description."""
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
    rounds: int = 9,
) -> dict[str, np.ndarray]:
    features, labels = _inputs(case)
    steps = {name: Step(module, features, labels) for name, module in modules.items()}
    return take_turns(steps, title=title, rounds=rounds, seconds=seconds)


def _case_text(classes: int, batch: int) -> str:
    return f"K = {classes:,}, B = {batch:,}"


def _clustered_vectors(num_classes: int, rng: np.random.Generator) -> np.ndarray:
    """Return Gaussian clusters within clusters, with about ten times as many on each successive
    level."""
    vectors = np.zeros((1, _LABEL_DIM))
    width = 1.0
    while len(vectors) < num_classes:
        size = min(10 * len(vectors), num_classes)
        parents = vectors[rng.integers(len(vectors), size=size)]
        vectors = parents + width * rng.normal(size=parents.shape)
        width /= 3
    return vectors
