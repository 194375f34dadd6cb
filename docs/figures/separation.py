"""The Principle of Logit Separation: one threshold for true and false logits."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.digits import Predictions, predictions
from docs.figures.look import FALSE, INK, TRUE, new_figure
from heads import LOSSES
from heads.slc import block_measures

_SHOWN = ("ce", "batch_ce", "bce")
_RECALL = 0.99


def draw() -> Figure:
    figure = new_figure(5.6)
    for ax, loss in zip(figure.subplots(len(_SHOWN), 1), _SHOWN, strict=True):
        _draw_logits(ax, loss, predictions(loss))
    ax.set_xlabel("logit")
    return figure


def _draw_logits(ax: Axes, loss: str, given: Predictions) -> None:
    true, false = given.logits[given.is_true], given.logits[~given.is_true]
    labels = (~given.is_true).flatten().long()
    measures = block_measures(
        given.logits.flatten()[:, None], labels, labels.new_zeros(1), [_RECALL]
    )
    threshold = float(measures.threshold)
    bins = np.linspace(float(false.min()), float(true.max()), 90).tolist()
    for values, color, name in (
        (false, FALSE, "logits of the other digits"),
        (true, TRUE, "logit of the true digit"),
    ):
        ax.hist(
            values.numpy(),
            bins,
            weights=np.full(len(values), 100 / len(values)),
            color=color,
            alpha=0.75,
            label=name,
        )
    ax.axvline(threshold, color=INK, ls="--", lw=1.5, label=f"threshold, recall {_RECALL:g}")
    above = float((false >= threshold).double().mean())
    aligned = "aligned" if LOSSES[loss]().aligned else "not aligned"
    ax.set_title(
        f"{loss} ({aligned}): {above:.1%} of the false logits reach the threshold; "
        f"top-1 {given.accuracy:.1%}"
    )
    ax.set_ylabel("share (%)")
    ax.locator_params("y", nbins=4, integer=True)
    ax.locator_params("x", integer=True)
    if loss == _SHOWN[0]:
        ax.legend(loc="upper left")
