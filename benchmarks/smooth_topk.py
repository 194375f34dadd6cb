"""Time of the smooth top-k loss alone, on given logits, relative to torch's cross_entropy."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.timing import Row, ratio_row, take_turns
from heads.losses import Block, Loss, Rows, SmoothTopK

BATCH = 256
# Classes, k, and the largest ratio.
CASES = ((1000, 5, 9), (1000, 10, 12), (1000, 50, 30), (100_000, 5, None))


def rows() -> Iterator[Row]:
    for classes, k, at_most in CASES:
        logits = torch.randn(BATCH, classes, requires_grad=True)
        labels = torch.randint(classes, (BATCH,))
        contenders = {
            "ours": _ours(SmoothTopK(k, 1.0), logits, labels),
            "theirs": _theirs(logits, labels),
        }
        case = f"n = {classes:,}, B = {BATCH}, k = {k}, tau = 1"
        times = take_turns(contenders, title=f"smooth_topk, {case}", rounds=25, seconds=20)
        what = "smooth_topk / cross_entropy, the loss alone"
        yield ratio_row(what, case, times["ours"], times["theirs"], at_most)


def _ours(loss: Loss, logits: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """Compute the gradient [B, K] with all classes in one block, as the engine does."""
    classes = torch.arange(logits.shape[1])

    def gradient() -> Tensor:
        block = Block.of(classes, labels, labels, logits)
        value = loss.value(loss.statistics(logits, block), Rows(len(classes), labels))
        by_logits, by_true = torch.autograd.grad(value, (logits, block.true))
        return block.positions.add(by_logits.contiguous(), by_true)

    return gradient


def _theirs(logits: Tensor, labels: Tensor) -> Callable[[], None]:
    def gradient() -> None:
        logits.grad = None
        cross_entropy(logits, labels).backward()

    return gradient
