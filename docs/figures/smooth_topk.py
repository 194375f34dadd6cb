"""Smooth top-k: the effect of the temperature on the loss and on its gradient."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from torch import Tensor

from docs.figures.given_logits import value_and_gradient
from docs.figures.look import GRAY, INK, new_figure
from heads.losses import CrossEntropy, Loss, SmoothTopK, TopKHinge

_K = 5
# (loss, color, line, marker), from the smoothest loss to the hinge.
_LOSSES: dict[str, tuple[Loss, str, str, str]] = {
    "ce": (CrossEntropy(), GRAY, ":", "x"),
    "τ = 1": (SmoothTopK(k=_K, tau=1.0), "#f0a63a", "-", "o"),
    "τ = 0.3": (SmoothTopK(k=_K, tau=0.3), "#d1495b", "-", "s"),
    "τ = 0.1": (SmoothTopK(k=_K, tau=0.1), "#7a2a8c", "-", "^"),
    "τ → 0: topk_hinge": (TopKHinge(k=_K), INK, "--", "D"),
}
_FALSE = torch.linspace(8, -8, 33, dtype=torch.float64)  # scores of the false classes
_RANKS = 14
_SHOWN_TRUE = 2.0


def draw() -> Figure:
    figure = new_figure(4.1)
    left, right = figure.subplots(1, 2)
    _draw_values(left)
    _draw_gradients(right)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def _of_true(loss: Loss, true: float) -> tuple[float, Tensor]:
    logits = torch.cat([torch.tensor([true], dtype=torch.float64), _FALSE])[None]
    value, gradient = value_and_gradient(loss, logits, torch.tensor([0]))
    return value, gradient[0, 1:]


def _draw_values(ax: Axes) -> None:
    trues = torch.linspace(-3, 17, 161).tolist()
    for loss, color, line, _ in _LOSSES.values():
        ax.plot(trues, [_of_true(loss, z)[0] for z in trues], line, color=color)
    kth = float(_FALSE[_K - 1])
    ax.axvline(kth, color=GRAY, lw=1, zorder=0)
    ax.text(kth + 0.2, 4.4, f"{_K}th largest\nfalse score", color=GRAY)
    ax.set(title=f"The loss, k = {_K}, α = 1", xlabel="true score", ylabel="loss", ylim=(0, 5.2))


def _draw_gradients(ax: Axes) -> None:
    ranks = list(range(1, _RANKS + 1))
    for name, (loss, color, line, marker) in _LOSSES.items():
        gradient = _of_true(loss, _SHOWN_TRUE)[1]
        share = (gradient / gradient.sum())[:_RANKS]
        ax.plot(ranks, share, line, marker=marker, color=color, ms=5, label=name)
    ax.set(
        title=f"Gradient of the false classes, true score {_SHOWN_TRUE:g}",
        xlabel="rank of the false class, by its score",
        ylabel="share of the gradient",
        ylim=(0, 1.03),
    )
    ax.xaxis.set_major_locator(MultipleLocator(1))
