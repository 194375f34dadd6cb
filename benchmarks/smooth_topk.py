"""What smooth top-k costs beside cross-entropy, and how exact its gradient is in float32.

The loss alone on given logits (statistics, value and the gradient of the logits) beside torch's
cross_entropy, and a whole head step beside one with `ce`. Contenders take turns, and a ratio is the
median over rounds of the ratio within a round, so that what else the machine does hits both sides.

    python -m benchmarks.smooth_topk --classes 1000 10000 100000 --runs 15
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.machine import machine
from heads import ClassHead
from heads.losses import Block, CrossEntropy, Loss, Rows, SmoothTopK

_TAUS = (0.001, 0.01, 0.1, 1.0)
_STDS = (1.0, 3.0, 30.0)


def main() -> None:
    """Measure and print three tables."""
    options = _options()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    console = Console()
    console.print(machine(), highlight=False)
    loss = SmoothTopK(options.k, options.tau)
    title = f"smooth_topk (k = {loss.k}, tau = {loss.tau:g}) beside ce, batch {options.batch}"
    table = Table("what", "classes", "smooth_topk ms", "ce ms", "ratio", "quartiles", title=title)
    for classes in options.classes:
        case = _loss_alone(loss, options.batch, classes)
        table.add_row("loss alone", f"{classes:,}", *_measured(case, options.runs))
    case = _head_step(loss, options.batch, options.head_classes, options.dim)
    what = f"head step, {options.dim} features"
    table.add_row(what, f"{options.head_classes:,}", *_measured(case, options.runs))
    console.print(table)
    console.print(_gradient_errors(options.k, options.batch, options.head_classes))


Step = Callable[[], None]


def _loss_alone(loss: Loss, batch: int, classes: int) -> tuple[Step, Step]:
    logits = torch.randn(batch, classes, requires_grad=True)
    labels = torch.randint(classes, (batch,))

    def ours() -> None:
        _gradient(loss, logits, labels)

    def theirs() -> None:
        logits.grad = None
        cross_entropy(logits, labels).backward()

    return ours, theirs


def _head_step(loss: Loss, batch: int, classes: int, dim: int) -> tuple[Step, Step]:
    features = torch.randn(batch, dim, requires_grad=True)
    labels = torch.randint(classes, (batch,))

    def step(head: ClassHead) -> None:
        features.grad = head.weight.grad = None
        head(features, labels).backward()

    ours, theirs = (ClassHead(dim, classes, each) for each in (loss, CrossEntropy()))
    return lambda: step(ours), lambda: step(theirs)


def _gradient(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    """The gradient [B, K] of the loss of all classes as one block, as the engine makes it."""
    classes = torch.arange(logits.shape[1])
    block = Block.of(classes, labels, labels, logits)
    value = loss.value(loss.statistics(logits, block), Rows(len(classes), labels))
    gradient, by_true = torch.autograd.grad(value, (logits, block.true))
    return gradient.index_put_(block.label_places, by_true, accumulate=True)


def _measured(case: tuple[Step, Step], runs: int) -> list[str]:
    """Both medians in milliseconds, and the median and quartiles of the ratio."""
    ours, theirs = zip(*([_seconds(step) for step in case] for _ in range(runs + 1)), strict=True)
    # The first round warms up.
    ours, theirs = ours[1:], theirs[1:]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    medians = [f"{1e3 * statistics.median(seconds):.2f}" for seconds in (ours, theirs)]
    return [*medians, f"{statistics.median(ratios):.2f}", f"{low:.2f}-{high:.2f}"]


def _seconds(step: Step) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _gradient_errors(k: int, batch: int, classes: int) -> Table:
    """The worst row's relative error of the float32 gradient against float64, norms under 1e-6
    counting as 1e-6; half of the labels are among the 2k largest scores."""
    title = f"worst relative gradient error of a row, float32, {classes:,} classes"
    table = Table("tau", *(f"std {std:g}" for std in _STDS), title=title)
    for tau in _TAUS:
        errors = [_worst_error(SmoothTopK(k, tau), batch, classes, std) for std in _STDS]
        table.add_row(f"{tau:g}", *(f"{error:.1e}" for error in errors))
    return table


def _worst_error(loss: Loss, batch: int, classes: int, std: float) -> float:
    logits = std * torch.randn(batch, classes)
    labels = torch.randint(classes, (batch,))
    rank = torch.randint(10, (batch // 2, 1))
    labels[: batch // 2] = logits[: batch // 2].topk(10).indices.gather(1, rank).squeeze(1)
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = logits.to(dtype).requires_grad_()
        found.append(batch * _gradient(loss, leaf, labels).double())
    single, double = found
    return float(((single - double).norm(dim=1) / double.norm(dim=1).clamp(min=1e-6)).max())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.smooth_topk",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--classes", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--tau", type=float, default=1.0)
    parser.add_argument("--head-classes", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--runs", type=int, default=15, help="rounds that count")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
