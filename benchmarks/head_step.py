"""Complete head steps (forward + backward, float32) compared with alternatives.

Before the timing, the engine's loss and gradients are compared with those of the naive step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import Row, ratio_row, take_turns
from heads import ClassHead, HierarchicalSoftmaxHead, LabelTree, build_cover_tree
from heads.engine.block_size import CPU_MEMORY_MIB
from heads.losses import LOSSES, CrossEntropy
from tests.heads.clustered import clustered

DIM = 512
# Classes, rows of the batch, memory limit in MiB, and the target of `engine`.
ENGINE_CASES = (
    (1_000, 256, CPU_MEMORY_MIB, 1.10),
    (10_000, 256, CPU_MEMORY_MIB, 1.05),
    (100_000, 256, CPU_MEMORY_MIB, 1.00),
    (100_000, 256, 128, None),
    (100_000, 1024, CPU_MEMORY_MIB, None),
)
# Classes, rows of the batch, and the target of `trees`.
TREE_CASES = (
    (10_000, 1024, 1.05),
    (10_000, 256, 1.15),
    (100_000, 1024, 1.05),
    (100_000, 256, 1.15),
)
LOSS_CASE = (10_000, 256)
SAMPLED_CASE = (100_000, 256)


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


def engine() -> Iterator[Row]:
    """Compare the engine's `ce` with linear + cross_entropy, with and without enough memory for all
    logits."""
    for classes, batch, memory_mib, at_most in ENGINE_CASES:
        head = ClassHead(DIM, classes, CrossEntropy(), memory_mib=memory_mib)
        modules = {"ours": head, "naive": LinearCrossEntropy(head)}
        _check(modules, classes, batch)
        rounds = 99 if classes < 10_000 else 9  # short steps vary more
        times = _timed(modules, classes, batch, rounds=rounds)
        case = f"{_case(classes, batch)}, {memory_mib} MiB"
        yield ratio_row(
            "engine ce / linear + cross_entropy", case, times["ours"], times["naive"], at_most
        )


def trees() -> Iterator[Row]:
    """Compare `ce` on a V-tree with dense `ce`."""
    for classes, batch, at_most in TREE_CASES:
        tree = _label_tree(classes)
        heads = {
            "vtree": ClassHead(DIM, tree, CrossEntropy()),
            "dense": ClassHead(DIM, classes, CrossEntropy()),
        }
        times = _timed(heads, classes, batch)
        levels = int(tree.depth.max()) + 1
        what = f"vtree step / dense step, cover tree of {tree.num_nodes:,} nodes on {levels} levels"
        yield ratio_row(what, _case(classes, batch), times["vtree"], times["dense"], at_most)


def losses() -> Iterator[Row]:
    """Compare every loss with `ce` on dense weights, and `ce` that samples 10% of the classes
    absent from the batch with exact `ce`."""
    classes, batch = LOSS_CASE
    targets = {"smooth_topk": 1.5, "simloss": 2.2}
    for kind in LOSSES:
        if kind != "ce":
            exact = ClassHead(DIM, classes, CrossEntropy())
            heads = {kind: loss_head(kind, classes, DIM), "ce": exact}
            times = _timed(heads, classes, batch, seconds=6)
            what, at_most = f"{kind} step / ce step", targets.get(kind, 1.2)
            yield ratio_row(what, _case(classes, batch), times[kind], times["ce"], at_most)
    classes, batch = SAMPLED_CASE
    heads = {
        "sampled": ClassHead(DIM, classes, CrossEntropy(sample_rate=0.1)),
        "exact": ClassHead(DIM, classes, CrossEntropy()),
    }
    times = _timed(heads, classes, batch)
    what = "ce, sample_rate 0.1 / exact ce"
    yield ratio_row(what, _case(classes, batch), times["sampled"], times["exact"])


def loss_head(kind: str, classes: int, dim: int) -> ClassHead:
    """Return a dense head with any loss. simloss gets random label vectors with 300 dimensions.

    Hierarchical softmax gets a tree instead of dense weights.
    """
    if kind == "hierarchical_softmax":
        return HierarchicalSoftmaxHead(dim, _label_tree(classes))
    return ClassHead(
        dim,
        classes,
        LOSSES[kind](),
        class_counts=torch.ones(classes),
        label_vectors=torch.randn(classes, 300) if kind == "simloss" else None,
    )


def _label_tree(num_classes: int) -> LabelTree:
    return build_cover_tree(clustered(num_classes, 32, seed=0, shrink=1 / 3)).vtree()


def _inputs(classes: int, batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, DIM, requires_grad=True), torch.randint(classes, (batch,))


def _check(modules: Mapping[str, nn.Module], classes: int, batch: int) -> None:
    """Check that all modules compute the same loss and gradients."""
    features, labels = _inputs(classes, batch)
    found = []
    for module in modules.values():
        loss = Step(module, features, labels)()
        found.append((loss, features.grad, next(module.parameters()).grad))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)


def _timed(
    modules: Mapping[str, nn.Module],
    classes: int,
    batch: int,
    *,
    seconds: float = 40,
    rounds: int = 9,
) -> dict[str, np.ndarray]:
    features, labels = _inputs(classes, batch)
    steps = {name: Step(module, features, labels) for name, module in modules.items()}
    title = f"{' and '.join(modules)}, {_case(classes, batch)}"
    return take_turns(steps, title=title, rounds=rounds, seconds=seconds)


def _case(classes: int, batch: int) -> str:
    return f"K = {classes:,}, B = {batch:,}"
