"""Spherical scores: what evaluation and serving compare in place of the logit, and why."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.look import AMBER, BLUE, GREY, INK, RED, new_figure
from heads.losses import Loss, SphericalSoftmax, TaylorSoftmax

_LOSSES: tuple[Loss, ...] = (TaylorSoftmax(), SphericalSoftmax())
_NAMES = ("taylor_softmax\n1 + z + z²/2", "spherical_softmax\nz² + ε")
_EXPONENTIAL = "softmax\nexp(z)"
_COLOURS, _STYLES = (BLUE, RED), ("-", "--")
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
    for loss, colour, style in zip(_LOSSES, _COLOURS, _STYLES, strict=True):
        ax.plot(logits, loss.score(logits), style, color=colour)
    ax.set(title="What a logit is worth", xlabel="logit z", ylabel="score", yscale="log")
    ax.set_ylim(5e-3, 40)
    ax.text(-4.1, 0.5, "1 + z + z²/2", color=BLUE, fontweight="bold")
    ax.text(-2.6, 13, "z² + ε", color=RED, fontweight="bold")
    ax.text(-2.4, 0.035, "exp(z)", fontweight="bold")


def _draw_example(ax: Axes) -> None:
    logits = torch.tensor([*_EXAMPLE.values()], dtype=torch.float64)
    worth = [logits.exp(), *(loss.score(logits) for loss in _LOSSES)]
    for group, scores in enumerate(worth):
        probabilities = scores / scores.sum()
        winner = int(probabilities.argmax())
        colours = [AMBER if i == winner else GREY for i in range(len(_EXAMPLE))]
        places = [group + 0.27 * (i - 1) for i in range(len(_EXAMPLE))]
        bars = ax.bar(places, probabilities.tolist(), 0.25, color=colours)
        ax.bar_label(bars, [f"{p:.2f}" for p in probabilities], fontsize=10)
        for place, name in zip(places, _EXAMPLE, strict=True):
            ax.text(place, -0.025, name, ha="center", va="top")
    ax.set_xticks(range(len(worth)), [_EXPONENTIAL, *_NAMES])
    ax.tick_params("x", length=0, pad=18)
    ax.set(ylim=(0, 1), yticks=[0, 0.5, 1])
    given = ", ".join(f"{name} {z:g}" for name, z in _EXAMPLE.items())
    ax.set_title(f"Probabilities from logits {given}".replace("-", "\N{MINUS SIGN}"))
