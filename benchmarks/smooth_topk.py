"""Cost of smooth top-k relative to cross-entropy, and the accuracy of its float32 gradient.

For given logits, the loss's statistics, value and gradient are compared with torch's cross_entropy.
head_step.py measures complete head steps.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.timing import Row, ratio_row, take_turns
from heads.losses import Block, Loss, Rows, SmoothTopK

K = 5
BATCH = 256
_TARGETS = {5: 8, 10: 12, 20: None, 50: 30}  # the largest ratio to cross-entropy, by k
_CLASSES = 10_000  # for the comparison of gradients
_TAUS = (0.001, 0.01, 0.1, 1.0)
_STDS = (1.0, 3.0, 30.0)


def costs() -> Iterator[Row]:
    """Time the loss alone on given logits, with the paper's k and with larger values."""
    cases = [(k, tau, 1000) for k in _TARGETS for tau in (1.0, 0.1)]
    cases += [(K, 1.0, 100_000), *((k, 1.0, 10_000) for k in _TARGETS)]
    for k, tau, classes in cases:
        loss = SmoothTopK(k, tau)
        logits = torch.randn(BATCH, classes, requires_grad=True)
        labels = torch.randint(classes, (BATCH,))

        def theirs(logits: Tensor = logits, labels: Tensor = labels) -> None:
            logits.grad = None
            cross_entropy(logits, labels).backward()

        def ours(loss: Loss = loss, logits: Tensor = logits, labels: Tensor = labels) -> None:
            _gradient(loss, logits, labels)

        contenders = {"ours": ours, "theirs": theirs}
        case = f"n = {classes:,}, B = {BATCH}, k = {k}, tau = {tau:g}"
        times = take_turns(contenders, title=f"smooth_topk, {case}", rounds=25, seconds=20)
        what = "smooth_topk / cross_entropy, the loss alone"
        yield ratio_row(what, case, times["ours"], times["theirs"], _TARGETS[k])


def errors() -> Iterator[Row]:
    """Measure the largest relative error of any row of the float32 gradient; check bf16 logits."""
    found = {(tau, std): _worst_error(SmoothTopK(K, tau), std) for tau in _TAUS for std in _STDS}
    worst = max(found, key=found.__getitem__)
    case = f"n = {_CLASSES:,}, tau {_TAUS[0]:g} to {_TAUS[-1]:g}, std {_STDS[0]:g} to {_STDS[-1]:g}"
    yield Row(
        "smooth_topk, worst row's relative gradient error in float32",
        case,
        f"{found[worst]:.1e}",
        "<= 1e-4",
        f"worst at tau {worst[0]:g}, std {worst[1]:g}",
    )
    finite = sum(_finite_in_bf16(SmoothTopK(K, tau), std) for tau in _TAUS for std in _STDS)
    yield Row(
        "smooth_topk, bf16 logits: settings with finite loss and gradient",
        case,
        f"{finite} of {len(found)}",
        f"{len(found)}",
    )


def _gradient(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient [B, K] of the loss with all classes in one block."""
    classes = torch.arange(logits.shape[1])
    block = Block.of(classes, labels, labels, logits)
    value = loss.value(loss.statistics(logits, block), Rows(len(classes), labels))
    gradient, by_true = torch.autograd.grad(value, (logits, block.true))
    return block.positions.add(gradient.contiguous(), by_true)


def _worst_error(loss: Loss, std: float) -> float:
    """Return the largest relative error of any row; norms are clamped to at least 1e-6.

    Half of the labels are among the 2k largest scores.
    """
    logits, labels = _problem(std)
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = logits.to(dtype).requires_grad_()
        found.append(BATCH * _gradient(loss, leaf, labels).double())
    single, double = found
    return float(((single - double).norm(dim=1) / double.norm(dim=1).clamp(min=1e-6)).max())


def _finite_in_bf16(loss: Loss, std: float) -> bool:
    """Return whether the gradient is finite under autocast: bf16 logits, float32 statistics."""
    logits, labels = _problem(std)
    leaf = logits.bfloat16().float().requires_grad_()
    return bool(_gradient(loss, leaf, labels).bfloat16().isfinite().all())


def _problem(std: float) -> tuple[Tensor, Tensor]:
    logits = std * torch.randn(BATCH, _CLASSES)
    labels = torch.randint(_CLASSES, (BATCH,))
    rank = torch.randint(2 * K, (BATCH // 2, 1))
    largest = logits[: BATCH // 2].topk(2 * K).indices
    labels[: BATCH // 2] = largest.gather(1, rank).squeeze(1)
    return logits, labels
