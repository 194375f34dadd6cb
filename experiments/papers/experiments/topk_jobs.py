"""Jobs that measure the speed and numerical stability of algorithms for the smooth top-k loss."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.papers.experiments import topk_reference as reference
from experiments.papers.job import Folders, Measures
from experiments.papers.turns import Seconds, synchronous, timed
from heads.losses import Block, Rows, SmoothTopK

K = 5
PRECISIONS = {"single": torch.float32, "double": torch.float64}

# A loss, and the tensors to differentiate it with respect to.
_Loss = tuple[Tensor, list[Tensor]]


def time_algorithms(settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Time forward and backward at temperature 1 for one number of classes (a job).

    Also measures the largest relative difference between the losses.
    """
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch, num_classes = settings["batch"], settings["classes"]
    logits = torch.randn(batch, num_classes, device=device, requires_grad=True)
    labels = torch.randint(num_classes, (batch,), device=device)

    def theirs(polynomials: reference.Polynomials) -> _Loss:
        return reference.smooth_topk(logits, labels, polynomials, k=K, tau=1.0), [logits]

    forward: dict[str, Callable[[], _Loss]] = {
        "summation": lambda: theirs(reference.summation),
        "divide and conquer": lambda: theirs(reference.divide_and_conquer),
        "ours": lambda: our_loss(logits, labels, 1.0),
    }
    backward: dict[str, Callable[[], _Loss]] = {
        "automatic": forward["divide and conquer"],
        "custom": lambda: theirs(reference.with_custom_backward),
        "ours": forward["ours"],
    }
    limits = {"rounds": settings["rounds"], "seconds": settings["seconds"]}
    with torch.no_grad():
        values = [float(loss()[0]) for loss in forward.values()]
        of_forward = timed(forward, folders, **limits)
    return {
        "forward": of_forward,
        "backward": _backward_seconds(backward, **limits),
        "losses_apart": max(abs(value / values[-1] - 1) for value in values),
        "device": device.type,
    }


def our_loss(logits: Tensor, labels: Tensor, tau: float) -> _Loss:
    """Return kway's loss with all classes in one block; the true logits are a separate leaf."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    block = Block.of(classes, labels, labels, logits)
    loss = SmoothTopK(K, tau)
    value = loss.value(loss.statistics(logits, block), Rows(len(classes), labels))
    return value, [logits, block.true]


def _backward_seconds(
    losses: Mapping[str, Callable[[], _Loss]], *, rounds: int, seconds: float
) -> Seconds:
    """Time only the backward passes, in turn; each one follows an untimed forward pass."""
    clock = synchronous(time.perf_counter)
    found: Seconds = {name: [] for name in losses}
    began = 0.0
    for done in range(-1, rounds):  # the first warms up
        if done == 0:
            began = clock()
        if done > 0 and (clock() - began) * (done + 1) / done > seconds:
            break
        for name, loss in losses.items():
            value, leaves = loss()
            started = clock()
            torch.autograd.grad(value, leaves)
            if done >= 0:
                found[name].append(clock() - started)
    return found


def try_temperatures(settings: Mapping[str, Any], _folders: Folders) -> Measures:
    """Check whether loss and gradient are finite (a job).

    The measures are keyed by algorithm and precision, then by the temperature's exponent.
    """
    scores, labels = trained_scores(
        settings["batch"], settings["classes"], gain=settings["gain"], seed=settings["seed"]
    )
    losses: dict[str, dict[str, bool]] = {}
    gradients: dict[str, dict[str, bool]] = {}
    for precision, dtype in PRECISIONS.items():
        for exponent in settings["exponents"]:
            logits = scores.to(dtype, copy=True).requires_grad_()
            for name, (loss, leaves) in _at(logits, labels, 10.0**exponent).items():
                of_this = f"{name} {precision}"
                losses.setdefault(of_this, {})[str(exponent)] = bool(loss.isfinite())
                if leaves:
                    is_finite = _has_finite_gradient(loss, leaves)
                    gradients.setdefault(of_this, {})[str(exponent)] = is_finite
    true_scores = scores.gather(1, labels[:, None])
    return {"losses": losses, "gradients": gradients, "true_score": float(true_scores.mean())}


def trained_scores(
    batch: int, num_classes: int, *, gain: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Return scores [batch, num_classes] similar to those of an ImageNet classifier, and labels.

    Scores are normally distributed with a standard deviation of 2.5. The score of the true class is
    then increased by `gain`, and those of four similar classes by half as much.
    """
    draw = torch.Generator().manual_seed(seed)
    scores = 2.5 * torch.randn(batch, num_classes, generator=draw, dtype=torch.float64)
    order = torch.rand(batch, num_classes, generator=draw).argsort(1)
    scores.scatter_add_(1, order[:, :1], torch.full((batch, 1), gain, dtype=torch.float64))
    scores.scatter_add_(1, order[:, 1:5], torch.full((batch, 4), gain / 2, dtype=torch.float64))
    return scores, order[:, 0]


def _at(logits: Tensor, labels: Tensor, tau: float) -> dict[str, _Loss]:
    def theirs(polynomials: reference.Polynomials) -> Tensor:
        return reference.smooth_topk(logits, labels, polynomials, k=K, tau=tau)

    return {
        "summation": (theirs(reference.summation), []),
        "divide and conquer": (theirs(reference.divide_and_conquer), [logits]),
        "custom backward": (theirs(reference.with_custom_backward), [logits]),
        "ours": our_loss(logits, labels, tau),
    }


def _has_finite_gradient(loss: Tensor, leaves: Sequence[Tensor]) -> bool:
    return all(bool(each.isfinite().all()) for each in torch.autograd.grad(loss, leaves))
