"""Single-logit measures: precision and recall of one class, and its thresholds."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.digits import NUM_CLASSES, Predictions, predictions
from docs.figures.look import FALSE, GRAY, INK, OF_LOSS, TRUE, new_figure
from heads.slc import ClassMeasures, block_measures

_SHOWN = ("ce", "batch_ce")
_MARKERS = {0.9: "o", 0.99: "s"}  # by recall
_LABELS = {"ce": (-34, -10), "batch_ce": (8, -2)}  # offset of the label of a marker, in points


def draw() -> Figure:
    given = {loss: predictions(loss) for loss in _SHOWN}
    measures = {
        loss: block_measures(predicted.logits, predicted.labels, torch.arange(NUM_CLASSES))
        for loss, predicted in given.items()
    }
    digit = _hardest_class([*measures.values()])
    figure = new_figure(4.2)
    left, right = figure.subplots(1, 2)
    _draw_logits(left, given[_SHOWN[0]], measures[_SHOWN[0]], digit)
    for loss in _SHOWN:
        _draw_curve(right, loss, given[loss], measures[loss], digit)
    for recall, marker in _MARKERS.items():
        right.plot([], [], marker, color=GRAY, mec=INK, ms=8, label=f"at recall {recall:g}")
    right.legend(loc="lower left")
    right.set(title=f"Precision and recall of digit {digit}", xlabel="recall", ylabel="precision")
    right.set(xlim=(0, 1.12), ylim=(0, 1.04))
    return figure


def _hardest_class(measures: list[ClassMeasures]) -> int:
    """The class with the lowest mean average precision, because easy classes have flat curves."""
    precision = torch.stack([measured.average_precision for measured in measures]).mean(0)
    return int(precision.argmin())


def _draw_logits(ax: Axes, given: Predictions, measured: ClassMeasures, digit: int) -> None:
    column, own = given.logits[:, digit], given.labels == digit
    bins = torch.linspace(float(column.min()), float(column.max()), 50).tolist()
    ax.hist(column[~own].numpy(), bins, color=FALSE, label=f"{int((~own).sum())} other images")
    name = f"{int(own.sum())} of digit {digit}"
    ax.hist(column[own].numpy(), bins, color=TRUE, alpha=0.8, label=name)
    top = ax.get_ylim()[1]
    for recall, threshold, style in zip(
        measured.recalls, measured.threshold[digit].tolist(), ("-", "--"), strict=True
    ):
        label = f"threshold, recall {recall:g}"
        ax.vlines(threshold, 0, top, color=INK, lw=1.5, ls=style, label=label)
    title = f"Logit of digit {digit}, trained with {_SHOWN[0]}"
    ax.set(title=title, xlabel="logit", ylabel="number of images")
    ax.set_ylim(0, 1.25 * top)  # space for the legend
    ax.legend(loc="upper left", ncols=2, columnspacing=1.0, handlelength=1.5)


def _draw_curve(
    ax: Axes, loss: str, given: Predictions, measured: ClassMeasures, digit: int
) -> None:
    own = (given.labels == digit)[given.logits[:, digit].argsort(descending=True, stable=True)]
    hits = own.cumsum(0)
    recall, precision = hits / hits[-1], hits / torch.arange(1, len(own) + 1)
    area = float(measured.average_precision[digit])
    ax.plot(recall, precision, color=OF_LOSS[loss], label=f"{loss}: AUPRC {area:.3f}")
    true = given.logits[given.labels == digit, digit]
    for i, target in enumerate(measured.recalls):
        x = float((true >= measured.threshold[digit, i]).double().mean())
        y = float(measured.precision_at[digit, i])
        ax.plot(x, y, _MARKERS[target], color=OF_LOSS[loss], mec=INK, ms=8, zorder=3)
        ax.annotate(f"{y:.2f}", (x, y), _LABELS[loss], textcoords="offset points")
