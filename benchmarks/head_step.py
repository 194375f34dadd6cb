"""How long a head's step (forward + backward) takes beside its alternatives, as ratios.

All contenders of a case take turns, one step each a round; a ratio is the median over rounds of
the ratio within a round, so that what else the machine does hits both sides; column CPU is the same
of the process's CPU seconds, which other processes hardly change. Before any clock runs, the
engine's loss and gradients are compared with the naive step's.

    python -m benchmarks.head_step --classes 10000 --batch 256 1024 --runs 9
"""

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.machine import machine
from heads import ClassHead, LabelTree, build_cover_tree
from heads.losses import LOSSES

# A cover tree takes O(K^2 d): above this number of classes the hierarchy is given instead.
_LARGEST_COVER_TREE = 20_000
_LABEL_DIM = 32

NAIVE, DENSE, KEPT, VTREE = "naive", "ce", "kept", "vtree"
RATIOS = ((DENSE, NAIVE), (KEPT, NAIVE), (VTREE, DENSE), ("batch_ce", DENSE), ("bce", DENSE))
LEGEND = {
    NAIVE: "torch.nn.functional.linear + cross_entropy",
    DENSE: "dense ClassHead, as are batch_ce and bce",
    KEPT: "the same with a memory budget that all logits fit, so that backward need not compute "
    "them again (where the given budget does, there is no such row)",
    VTREE: "ce over a V-tree",
}


def main() -> None:
    """Measure every case and print the table."""
    options = _options()
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    header = ("classes", "batch", "A", "ms", "B", "ms", "A / B", "quartiles", "CPU", "n")
    table = Table(*header, box=box.SIMPLE_HEAD, padding=0)
    notes = [
        machine(),
        f"{options.dim} features and a bias, float32, memory budget {options.memory_mib} MiB",
    ]
    for classes in options.classes:
        tree, note = label_tree(classes)
        notes.append(note)
        for batch in options.batch:
            case = Case(classes, batch, options.dim)
            steps = contenders(case, tree, options.memory_mib)
            title = f"{classes:,} classes, batch {batch:,}"
            for row in rows(case, take_turns(steps, options.runs, options.seconds, title)):
                table.add_row(*row)
            table.add_section()
    console = Console()
    for note in (*notes, *(f"{name}: {meaning}" for name, meaning in LEGEND.items())):
        console.print(note, highlight=False)
    console.print(table)


@dataclass(frozen=True)
class Case:
    """`classes` x `dim` weights (and a bias), a batch of `batch` rows."""

    classes: int
    batch: int
    dim: int

    @property
    def mib_for_all_logits(self) -> int:
        """A memory budget at which the engine takes all classes as one block."""
        return (2 * 4 * self.classes * (3 * self.batch + 2 * (self.dim + 1)) >> 20) + 1


@dataclass(frozen=True)
class Step:
    """Forward and backward of a module that maps features [B, d] and labels [B] to a loss."""

    module: nn.Module
    features: Tensor
    labels: Tensor

    def run(self) -> Tensor:
        loss: Tensor = self.module(self.features, self.labels)
        loss.backward()
        return loss.detach()

    def forget_gradients(self) -> None:
        """The next step makes gradients anew, as a training loop's does, and adds to none."""
        self.features.grad = None
        self.module.zero_grad(set_to_none=True)


class LinearCrossEntropy(nn.Module):
    """What one writes without kway."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(features, self.weight, self.bias), labels)


def contenders(case: Case, tree: LabelTree, memory_mib: int) -> dict[str, Step]:
    """The steps of a case by name; all dense ones share one matrix."""
    features = torch.randn(case.batch, case.dim, requires_grad=True)
    labels = torch.randint(case.classes, (case.batch,))

    def head(tree: LabelTree | int, loss: str, memory_mib: int = memory_mib) -> ClassHead:
        return ClassHead(case.dim, tree, LOSSES[loss](), memory_mib=memory_mib)

    dense = head(case.classes, "ce")
    weight = dense.weight.detach()
    heads = {DENSE: dense, VTREE: head(tree, "ce")}
    heads |= {loss: head(case.classes, loss) for loss in ("batch_ce", "bce")}
    if 3 * 4 * case.classes * case.batch > memory_mib << 19:
        heads[KEPT] = head(case.classes, "ce", case.mib_for_all_logits)
    for module in heads.values():
        if module.tree.num_nodes == case.classes:
            module.weight = dense.weight
    naive = LinearCrossEntropy(weight[:, :-1].contiguous(), weight[:, -1].contiguous())
    modules: dict[str, nn.Module] = {NAIVE: naive, **heads}
    steps = {name: Step(module, features, labels) for name, module in modules.items()}
    agree(steps[NAIVE], steps[DENSE])
    return steps


def agree(naive: Step, ours: Step) -> None:
    """Both sides of the first ratio compute the same thing, or the ratio means nothing."""
    found = []
    for step in (naive, ours):
        loss, dim = step.run(), step.features.shape[1]
        weight = next(step.module.parameters())
        assert weight.grad is not None
        found.append((loss, step.features.grad, weight.grad[:, :dim]))
        step.forget_gradients()
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)


def take_turns(
    steps: dict[str, Step], runs: int, limit_seconds: float, title: str
) -> dict[str, np.ndarray]:
    """Seconds [rounds, 2] of each step, by the clock and of CPU; fewer than `runs` rounds, but one
    at least, where another would pass the limit."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    began = time.perf_counter()
    for done in track(range(runs), title, console=Console(stderr=True), transient=True):
        elapsed = time.perf_counter() - began
        if done and elapsed * (done + 1) / done > limit_seconds:
            break
        for name, step in steps.items():
            started, cpu = time.perf_counter(), time.process_time()
            step.run()
            seconds[name].append((time.perf_counter() - started, time.process_time() - cpu))
            step.forget_gradients()
    return {name: np.array(pairs) for name, pairs in seconds.items()}


def rows(case: Case, seconds: dict[str, np.ndarray]) -> list[list[str]]:
    """Table rows: both medians, the median ratio and its quartiles, and that of CPU seconds."""
    found = []
    for a, b in RATIOS:
        if a not in seconds:
            continue
        ratios, cpu_ratios = (seconds[a] / seconds[b]).T
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        times = [f"{1e3 * np.median(seconds[name][:, 0]):,.0f}" for name in (a, b)]
        shape = [f"{case.classes:,}", f"{case.batch:,}"]
        ratio = [f"{middle:.2f}", f"{low:.2f}–{high:.2f}", f"{np.median(cpu_ratios):.2f}"]
        found.append([*shape, a, times[0], b, times[1], *ratio, str(len(ratios))])
    return found


def label_tree(num_classes: int) -> tuple[LabelTree, str]:
    """A V-tree over random clustered label vectors, or over a random hierarchy; and its story."""
    rng = np.random.default_rng(0)
    if num_classes <= _LARGEST_COVER_TREE:
        tree = build_cover_tree(clustered_vectors(num_classes, rng)).vtree()
        origin = f"cover tree (base 1.3) over clustered {_LABEL_DIM}-d label vectors"
    else:
        tree, origin = hierarchy(num_classes, rng), "random hierarchy of 3 levels"
    return tree, (
        f"vtree of {num_classes:,} classes: {tree.num_nodes:,} nodes on "
        f"{tree.depth.max() + 1} levels, {origin}"
    )


def clustered_vectors(num_classes: int, rng: np.random.Generator) -> np.ndarray:
    """Gaussian clusters within clusters: ten times smaller and about ten times as many a level."""
    vectors = np.zeros((1, _LABEL_DIM))
    width = 1.0
    while len(vectors) < num_classes:
        size = min(10 * len(vectors), num_classes)
        parents = vectors[rng.integers(len(vectors), size=size)]
        vectors = parents + width * rng.normal(size=parents.shape)
        width /= 3
    return vectors


def hierarchy(num_classes: int, rng: np.random.Generator) -> LabelTree:
    """Classes under about K/10 inner nodes under about K/100, each parent drawn at random."""
    middle, top = num_classes // 10, num_classes // 100
    # The first children of every inner node are dealt out, so that none is without.
    leaf_parents = np.concatenate(
        [np.arange(middle), rng.integers(middle, size=num_classes - middle)]
    )
    middle_parents = np.concatenate([np.arange(top), rng.integers(top, size=middle - top)])
    parents = np.concatenate(
        [num_classes + leaf_parents, num_classes + middle + middle_parents, np.full(top, -1)]
    )
    classes = np.concatenate([np.arange(num_classes), np.full(middle + top, -1)])
    return LabelTree.from_parents(parents, classes)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.head_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--classes", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--runs", type=int, default=7, help="rounds that count")
    parser.add_argument("--seconds", type=float, default=40, help="limit of a case, by rounds")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--memory-mib", type=int, default=256, help="the head's memory budget")
    return parser.parse_args()


if __name__ == "__main__":
    main()
