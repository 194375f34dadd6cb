"""Speed and memory of the heads, as ratios: `python -m benchmarks.heads [SECTION ...]`.

Contenders take turns in each round. The table shows the median ratio over rounds next to its
target. Steps are forward and backward in float32. Before the timing, the engine's loss and
gradients are compared with those of the naive step.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import (
    Row,
    Sections,
    command_line,
    numbers_of_a_process,
    peak_bytes,
    ratio_row,
    report,
    take_turns,
)
from heads import ClassHead, HierarchicalSoftmaxHead, LabelTree, build_cover_tree
from heads.engine.block_size import CPU_MEMORY_MIB
from heads.losses import LOSSES, Block, CrossEntropy, Rows, SmoothTopK
from heads.tree import CoverTree
from launch.terminal import progress
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
TOPK_BATCH = 256
# Classes, k, and the largest ratio of `smooth_topk`.
TOPK_CASES = ((1000, 5, 9), (1000, 10, 12), (1000, 50, 30), (100_000, 5, None))
# Classes, dimensions and rows of `peak_memory`, its memory limit for logits, and its target.
PEAK_CLASSES, _PEAK_DIM, _PEAK_BATCH = 1_000_000, 64, 512
PEAK_KINDS = tuple(LOSSES)
_PEAK_LIMIT_MIB, _MOST_MB = 256, 200
# Classes and dimensions of the vectors of `cover_trees`.
VECTORS, MANY_VECTORS = (100_000, 300), (1_000_000, 64)


def step_of(module: nn.Module, features: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """Return forward and backward of a module that maps features [B, d] and labels [B] to a loss.

    Gradients are not accumulated over calls, as in a training loop.
    """

    def step() -> Tensor:
        features.grad = None
        module.zero_grad(set_to_none=True)
        loss: Tensor = module(features, labels)
        loss.backward()
        return loss.detach()

    return step


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


def smooth_topk() -> Iterator[Row]:
    """Compare the smooth top-k loss alone, on given logits, with torch's cross_entropy."""
    for classes, k, at_most in TOPK_CASES:
        logits = torch.randn(TOPK_BATCH, classes, requires_grad=True)
        labels = torch.randint(classes, (TOPK_BATCH,))
        contenders = {
            "ours": partial(_gradient_of_topk, SmoothTopK(k, 1.0), logits, labels),
            "theirs": partial(_gradient_of_cross_entropy, logits, labels),
        }
        case = f"n = {classes:,}, B = {TOPK_BATCH}, k = {k}, tau = 1"
        times = take_turns(contenders, title=f"smooth_topk, {case}", rounds=25, seconds=20)
        what = "smooth_topk / cross_entropy, the loss alone"
        yield ratio_row(what, case, times["ours"], times["theirs"], at_most)


def _gradient_of_topk(loss: SmoothTopK, logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the gradient [B, K] with all classes in one block, as the engine does."""
    num_classes = logits.shape[1]
    block = Block.of(torch.arange(num_classes), labels, labels, logits)
    value = loss.value(loss.statistics(logits, block), Rows(num_classes, labels))
    by_logits, by_true = torch.autograd.grad(value, (logits, block.true))
    return block.positions.add(by_logits.contiguous(), by_true)


def _gradient_of_cross_entropy(logits: Tensor, labels: Tensor) -> None:
    logits.grad = None
    F.cross_entropy(logits, labels).backward()


def peak_memory() -> Iterator[Row]:
    """Measure the peak memory of a step in addition to the weights and their gradient, for every
    loss in a process of its own. The logits of a naive step and their gradient would take 4,096
    MB."""
    found = {}
    for kind in track(PEAK_KINDS, "peak memory", console=Console(stderr=True), transient=True):
        case = f"{kind}:{PEAK_CLASSES}"
        (found[kind],) = numbers_of_a_process("benchmarks.heads", "--peak", case)
    least, most = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
    every = ", ".join(f"{kind} {megabytes:.0f}" for kind, megabytes in found.items())
    yield Row(
        "extra peak memory of a step, any loss",
        f"K = {PEAK_CLASSES:,}, B = {_PEAK_BATCH}, d = {_PEAK_DIM}, {_PEAK_LIMIT_MIB} MiB",
        f"{found[most]:.0f} MB",
        f"<= {_MOST_MB} MB",
        f"most {most}, least {least} {found[least]:.0f}; {every}",
    )


def _extra_megabytes(kind: str, classes: int) -> float:
    """Return the peak memory of a step, less the memory before it and the weights' gradient."""
    torch.manual_seed(0)
    head = loss_head(kind, classes, _PEAK_DIM)
    head.engine = replace(head.engine, memory_bytes=_PEAK_LIMIT_MIB << 20)
    features = torch.randn(_PEAK_BATCH, _PEAK_DIM, requires_grad=True)
    step = step_of(head, features, torch.randint(classes, (_PEAK_BATCH,)))
    return (peak_bytes(step, torch.device("cpu")) - head.weight.nbytes) / 1e6


def cover_trees() -> Iterator[Row]:
    """Measure the time and memory to build cover trees of clusters of clusters, and of independent
    Gaussian vectors."""
    clusters, gaussian = "clusters of clusters", "independent Gaussian vectors"
    yield _built(clustered(*VECTORS, seed=0), clusters, "<= 60 s")
    normal = np.random.default_rng(0).normal(size=VECTORS).astype(np.float32)
    yield _built(normal, gaussian, "<= 60 s")
    yield _built(clustered(*MANY_VECTORS, seed=0), clusters, "<= 15 min")


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


def _built(vectors: np.ndarray, kind: str, at_most: str) -> Row:
    num, dim = vectors.shape
    found: list[tuple[CoverTree, LabelTree]] = []

    def build() -> None:
        with progress("building the tree", "classes") as shown:
            cover = build_cover_tree(vectors, report=shown)
        found.append((cover, cover.vtree()))

    started, cpu = time.perf_counter(), time.process_time()
    memory = peak_bytes(build, torch.device("cpu"))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    ((cover, tree),) = found
    return Row(
        f"cover tree and V-tree of {kind}",
        f"{num:,} x {dim}, base {cover.base}",
        f"{seconds:.1f} s",
        at_most,
        f"{cpu:.0f} CPU-seconds; {memory / vectors.size:.0f} bytes of memory per coordinate "
        f"besides the input; {tree.num_nodes - num:,} pseudoclasses, "
        f"{int(cover.level.max()) + 1} levels",
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
        loss = step_of(module, features, labels)()
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
    steps = {name: step_of(module, features, labels) for name, module in modules.items()}
    title = f"{' and '.join(modules)}, {_case(classes, batch)}"
    return take_turns(steps, title=title, rounds=rounds, seconds=seconds)


def _case(classes: int, batch: int) -> str:
    return f"K = {classes:,}, B = {batch:,}"


SECTIONS: Sections = {
    "engine": engine,
    "trees": trees,
    "losses": losses,
    "smooth_topk": smooth_topk,
    "peak_memory": peak_memory,
    "cover_tree": cover_trees,
}

if __name__ == "__main__":
    parser = command_line("heads", __doc__)
    parser.add_argument("--peak", metavar="LOSS:CLASSES", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak is not None:
        kind, _, classes = options.peak.partition(":")
        print(f"{_extra_megabytes(kind, int(classes)):.1f}")
    else:
        report(options, SECTIONS)
