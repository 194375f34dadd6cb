"""Quadratic losses: the share of the true class in the gradient, by the number of classes."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.given_logits import value_and_gradient
from docs.figures.look import BLUE, GRAY, INK, RED, new_figure
from heads.losses import CorrectClassQuadratic, CrossEntropy, Loss, Quadratic

_LOSSES: dict[str, tuple[Loss, str, str]] = {
    "ce": (CrossEntropy(), GRAY, ":"),
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
    for kind, (loss, color, style) in _LOSSES.items():
        shares = [_share(loss, num_classes) for num_classes in _CLASSES]
        ax.plot(_CLASSES, shares, style, color=color)
        ax.annotate(
            kind,
            (_CLASSES[-1], shares[-1]),
            (6, 0),
            textcoords="offset points",
            color=color,
            va="center",
            fontweight="bold",
        )
    ax.set(
        title="Share of the true class in |gradient|,\nall logits at 1/2",
        xlabel="number of classes K",
        ylabel="share",
        xscale="log",
        yscale="log",
        ylim=(5e-6, 1),
    )


def _share(loss: Loss, num_classes: int) -> float:
    logits = torch.full((1, num_classes), 0.5, dtype=torch.float64)
    _, gradient = value_and_gradient(loss, logits, torch.tensor([0]))
    return float(gradient[0, 0].abs() / gradient.abs().sum())


def _draw_costs(ax: Axes) -> None:
    """Draw the loss for an error in one logit; for a false logit both losses are the same."""
    errors = torch.linspace(-1, 1, 81, dtype=torch.float64).tolist()
    ccql, quadratic = CorrectClassQuadratic(), Quadratic()
    for loss, column, line, color, name in (
        (ccql, 0, "-", BLUE, "true class, ccql"),
        (quadratic, 0, "--", RED, "true class, quadratic"),
        (ccql, 1, ".", INK, "false class, both losses"),
    ):
        at = errors[::8] if line == "." else errors
        ax.plot(at, [_cost(loss, column, e) for e in at], line, color=color, label=name)
    ax.set(title=f"Loss for an error in one logit,\n{_SHOWN} classes", xlabel="error of the logit")
    ax.set(ylabel="loss", ylim=(-0.2, 7.6))
    ax.legend(loc="upper center")


def _cost(loss: Loss, column: int, error: float) -> float:
    logits = torch.zeros(1, _SHOWN, dtype=torch.float64)
    logits[0, 0] = 1
    logits[0, column] += error
    return value_and_gradient(loss, logits, torch.tensor([0]))[0]
