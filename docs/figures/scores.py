"""Spherical scores, which evaluation and serving compare instead of logits."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.look import AMBER, BLUE, GRAY, INK, RED, new_figure
from heads.losses import Loss, SphericalSoftmax, TaylorSoftmax

_LOSSES: tuple[Loss, ...] = (TaylorSoftmax(), SphericalSoftmax())
_NAMES = ("taylor_softmax\n1 + z + z²/2", "spherical_softmax\nz² + ε")
_EXPONENTIAL = "softmax\nexp(z)"
_COLORS, _STYLES = (BLUE, RED), ("-", "--")
_EXAMPLE = {"A": -4.0, "B": 1.5, "C": 0.5}


def draw() -> Figure:
    figure = new_figure(3.9)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    _draw_curves(left)
    _draw_example(right)
    return figure


def _draw_curves(ax: Axes) -> None:
    logits = torch.linspace(-4, 3, 281, dtype=torch.float64)
    ax.plot(logits, logits.exp(), ":", color=INK)
    for loss, color, style in zip(_LOSSES, _COLORS, _STYLES, strict=True):
        ax.plot(logits, loss.score(logits), style, color=color)
    ax.set(title="Score of a logit", xlabel="logit z", ylabel="score", yscale="log")
    ax.set_ylim(5e-3, 40)
    ax.text(-4.1, 0.5, "1 + z + z²/2", color=BLUE, fontweight="bold")
    ax.text(-2.6, 13, "z² + ε", color=RED, fontweight="bold")
    ax.text(-2.4, 0.035, "exp(z)", fontweight="bold")


def _draw_example(ax: Axes) -> None:
    logits = torch.tensor([*_EXAMPLE.values()], dtype=torch.float64)
    all_scores = [logits.exp(), *(loss.score(logits) for loss in _LOSSES)]
    for group, scores in enumerate(all_scores):
        probabilities = scores / scores.sum()
        winner = int(probabilities.argmax())
        colors = [AMBER if i == winner else GRAY for i in range(len(_EXAMPLE))]
        positions = [group + 0.27 * (i - 1) for i in range(len(_EXAMPLE))]
        bars = ax.bar(positions, probabilities.tolist(), 0.25, color=colors)
        ax.bar_label(bars, [f"{p:.2f}" for p in probabilities], fontsize=10)
        for x, name in zip(positions, _EXAMPLE, strict=True):
            ax.text(x, -0.025, name, ha="center", va="top")
    ax.set_xticks(range(len(all_scores)), [_EXPONENTIAL, *_NAMES])
    ax.tick_params("x", length=0, pad=18)
    ax.set(ylim=(0, 1), yticks=[0, 0.5, 1], ylabel="probability")
    given = ", ".join(f"{name} = {z:g}" for name, z in _EXAMPLE.items())
    ax.set_title(f"Probabilities for logits {given}".replace("-", "\N{MINUS SIGN}"))
