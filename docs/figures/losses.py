"""The losses, each as a function of the true logit and of the level of the row."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from docs.figures.given_logits import value_and_gradient
from docs.figures.look import BLUE, INK, RED, new_figure
from heads.losses import LOSSES, Asymmetric, ClassFacts, DecoupledSoftmax, Loss

_CLASSES, _COLUMNS = 10, 4
# With one label per row, the first equals `ce`, and the second is a `bce` with other weights.
_OMITTED = (DecoupledSoftmax, Asymmetric)
_LEAD = 4.0  # difference between the true logit and the mean false logit while the level varies
_FACTS = ClassFacts(
    _CLASSES,
    counts=torch.ones(_CLASSES),
    label_vectors=torch.eye(_CLASSES, 4, dtype=torch.float64) + 0.3,
)


def draw() -> Figure:
    drawn = (loss for loss in LOSSES.values() if not loss.over_nodes and loss not in _OMITTED)
    prepared = [loss().prepare(_FACTS) for loss in drawn]
    aligned = [loss for loss in prepared if loss.aligned]
    others = [loss for loss in prepared if not loss.aligned]
    heights = [-(-(len(others) + 1) // _COLUMNS), -(-len(aligned) // _COLUMNS)]
    figure = new_figure(1.62 * sum(heights) + 0.9)
    titles = (
        "Not aligned: a small loss does not determine the level or the scale of a row",
        "Aligned with the Principle of Logit Separation: a small loss determines the level",
    )
    parts = figure.subfigures(2, 1, squeeze=False, height_ratios=[h + 0.28 for h in heights])
    for part, rows, title, losses in zip(
        parts[:, 0], heights, titles, (others, aligned), strict=True
    ):
        part.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        tiles = part.subplots(rows, _COLUMNS, sharex=True).ravel()
        for tile in tiles[len(losses) :]:
            tile.axis("off")
        for tile, loss in zip(tiles, losses, strict=False):
            _draw_loss(tile, loss)
        if losses is others:
            _draw_legend(tiles[len(losses)])
        part.supylabel("loss", fontsize=10.5)
    part.supxlabel("true logit (solid), or shift of all logits (dashed)", fontsize=10.5)
    return figure


def _draw_loss(ax: Axes, loss: Loss) -> None:
    moves = torch.linspace(-8, 8, 129).tolist()
    of_true = [_value(loss, true=z, level=0) for z in moves]
    ax.plot(moves, of_true, color=BLUE)
    ax.plot(moves, [_value(loss, true=_LEAD, level=c) for c in moves], "--", color=RED)
    if ax.get_ylim()[1] > 2 * max(of_true) > 0:
        ax.set_ylim(top=2 * max(of_true))  # a steep dashed curve would flatten the other one
    ax.set_title(loss.kind, fontsize=10.5, pad=3)
    ax.yaxis.set_major_locator(MaxNLocator(2))
    ax.set_xticks([-8, 0, 8])
    ax.tick_params(labelsize=9, length=2)


def _value(loss: Loss, *, true: float, level: float) -> float:
    """The loss of a row with label 0 and false logits around 0. For batch losses, the batch also
    contains a second row with a small loss."""
    false = torch.linspace(-1, 1, _CLASSES - 1, dtype=torch.float64)
    row = torch.cat([torch.tensor([true], dtype=torch.float64), false]) + level
    good = torch.cat([false[:1], torch.tensor([_LEAD], dtype=torch.float64), false[1:]])
    rows = torch.stack([row, good]) if loss.couples_rows else row[None]
    return value_and_gradient(loss, rows, torch.arange(len(rows)))[0]


def _draw_legend(ax: Axes) -> None:
    ax.plot([], [], color=BLUE, label="only the true\nlogit changes")
    ax.plot([], [], "--", color=RED, label="all logits change,\ntrue logit 4 ahead")
    ax.legend(loc="center", labelcolor=INK, fontsize=10)
