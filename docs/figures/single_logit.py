"""Single-logit measures: precision and recall of one class, and the thresholds that serve it."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.digits import NUM_CLASSES, Answers, answers
from docs.figures.look import FALSE, GREY, INK, OF_LOSS, TRUE, new_figure
from heads.slc import ClassMeasures, block_measures

_SHOWN = ("ce", "batch_ce")
_MARKERS = {0.9: "o", 0.99: "s"}  # by recall
_LABELS = {"ce": (-34, -10), "batch_ce": (8, -2)}  # where a point's number stands, in points


def draw() -> Figure:
    given = {loss: answers(loss) for loss in _SHOWN}
    measures = {
        loss: block_measures(answer.logits, answer.labels, torch.arange(NUM_CLASSES))
        for loss, answer in given.items()
    }
    digit = _hardest_class([*measures.values()])
    figure = new_figure(4.2)
    left, right = figure.subplots(1, 2)
    _draw_logits(left, given[_SHOWN[0]], measures[_SHOWN[0]], digit)
    for loss in _SHOWN:
        _draw_curve(right, loss, given[loss], measures[loss], digit)
    for recall, marker in _MARKERS.items():
        right.plot([], [], marker, color=GREY, mec=INK, ms=8, label=f"at recall {recall:g}")
    right.legend(loc="lower left")
    right.set(title="Its precision and recall, by loss", xlabel="recall", ylabel="precision")
    right.set(xlim=(0, 1.12), ylim=(0, 1.04))
    return figure


def _hardest_class(measures: list[ClassMeasures]) -> int:
    """The class of least average precision over the losses: an easy one has no curve to see."""
    precision = torch.stack([measured.average_precision for measured in measures]).mean(0)
    return int(precision.argmin())


def _draw_logits(ax: Axes, given: Answers, measured: ClassMeasures, digit: int) -> None:
    column, own = given.logits[:, digit], given.labels == digit
    bins = torch.linspace(float(column.min()), float(column.max()), 50).tolist()
    ax.hist(column[~own].numpy(), bins, color=FALSE, label=f"{int((~own).sum())} other images")
    ax.hist(column[own].numpy(), bins, color=TRUE, alpha=0.8, label=f"{int(own.sum())} of it")
    top = ax.get_ylim()[1]
    for recall, threshold, style in zip(
        measured.recalls, measured.threshold[digit].tolist(), ("-", "--"), strict=True
    ):
        label = f"threshold, recall {recall:g}"
        ax.vlines(threshold, 0, top, color=INK, lw=1.5, ls=style, label=label)
    ax.set(title=f"The logit of digit {digit}, loss {_SHOWN[0]}", xlabel="logit", ylabel="images")
    ax.set_ylim(0, 1.25 * top)  # room for the legend
    ax.legend(loc="upper left", ncols=2, columnspacing=1.0, handlelength=1.5)


def _draw_curve(ax: Axes, loss: str, given: Answers, measured: ClassMeasures, digit: int) -> None:
    own = (given.labels == digit)[given.logits[:, digit].argsort(descending=True, stable=True)]
    hits = own.cumsum(0)
    recall, precision = hits / hits[-1], hits / torch.arange(1, len(own) + 1)
    area = float(measured.average_precision[digit])
    ax.plot(recall, precision, color=OF_LOSS[loss], label=f"{loss}: AUPRC {area:.3f}")
    true = given.logits[given.labels == digit, digit]
    for i, wanted in enumerate(measured.recalls):
        place = float((true >= measured.threshold[digit, i]).double().mean())
        reached = float(measured.precision_at[digit, i])
        ax.plot(place, reached, _MARKERS[wanted], color=OF_LOSS[loss], mec=INK, ms=8, zorder=3)
        ax.annotate(f"{reached:.2f}", (place, reached), _LABELS[loss], textcoords="offset points")
