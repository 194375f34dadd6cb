"""Quadratic losses: how much of a row's gradient is about its correct class, as classes grow."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.given_logits import value_and_gradient
from docs.figures.look import BLUE, GREY, INK, RED, new_figure
from heads.losses import CorrectClassQuadratic, CrossEntropy, Loss, Quadratic

_LOSSES: dict[str, tuple[Loss, str, str]] = {
    "ce": (CrossEntropy(), GREY, ":"),
    "ccql": (CorrectClassQuadratic(), BLUE, "-"),
    "quadratic": (Quadratic(), RED, "--"),
}
_CLASSES = (2, 5, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
_SHOWN = 100  # classes of the right panel


def draw() -> Figure:
    figure = new_figure(3.6)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_shares(left)
    _draw_costs(right)
    return figure


def _draw_shares(ax: Axes) -> None:
    for kind, (loss, colour, style) in _LOSSES.items():
        shares = [_share(loss, num_classes) for num_classes in _CLASSES]
        ax.plot(_CLASSES, shares, style, color=colour)
        ax.annotate(
            kind,
            (_CLASSES[-1], shares[-1]),
            (6, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            fontweight="bold",
        )
    ax.set(
        title="Share of the correct class in |gradient|,\nevery logit at 1/2",
        xlabel="classes K",
        xscale="log",
        yscale="log",
        ylim=(5e-6, 1),
    )


def _share(loss: Loss, num_classes: int) -> float:
    logits = torch.full((1, num_classes), 0.5, dtype=torch.float64)
    _, gradient = value_and_gradient(loss, logits, torch.tensor([0]))
    return float(gradient[0, 0].abs() / gradient.abs().sum())


def _draw_costs(ax: Axes) -> None:
    """What an error of one logit costs; the curves of a false logit are those of both losses."""
    errors = torch.linspace(-1, 1, 81, dtype=torch.float64).tolist()
    ccql, quadratic = CorrectClassQuadratic(), Quadratic()
    for loss, column, line, colour, name in (
        (ccql, 0, "-", BLUE, "correct class, ccql"),
        (quadratic, 0, "--", RED, "correct class, quadratic"),
        (ccql, 1, ".", INK, "false class, either loss"),
    ):
        at = errors[::8] if line == "." else errors
        ax.plot(at, [_cost(loss, column, e) for e in at], line, color=colour, label=name)
    ax.set(
        title=f"What an error of one logit costs,\n{_SHOWN} classes", xlabel="error of the logit"
    )
    ax.set(ylabel="loss", ylim=(-0.2, 7.6))
    ax.legend(loc="upper center")


def _cost(loss: Loss, column: int, error: float) -> float:
    logits = torch.zeros(1, _SHOWN, dtype=torch.float64)
    logits[0, 0] = 1
    logits[0, column] += error
    return value_and_gradient(loss, logits, torch.tensor([0]))[0]
