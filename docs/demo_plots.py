"""The plots of the demo's runs in README: one class's logit under two losses, and the effect of a
label tree."""

from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from data.loading.loader import EvalLoader
from data.shards.split import open_split
from heads.slc import block_measures
from launch.commands.demo import DENSE_BATCH_CE, DENSE_CE, VTREE_CE, DemoRun
from trainer.run.trained_run import open_trained
from trainer.world import World

_FALSE, _TRUE, _LINE = "#9aa5b1", "#d1495b", "#1f2933"
_COLORS = {DENSE_CE: "#edae49", DENSE_BATCH_CE: "#00798c", VTREE_CE: "#66a182"}
_RECALL = 0.9


@dataclass(frozen=True)
class Logits:
    """A run's logits [N, K] on the held-out images, and the labels [N] of the images."""

    logits: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]


def draw(out: Path, world: World, path: Path) -> None:
    """Plot the demo's runs and write the figure to `path` (PNG)."""
    matplotlib.use("Agg")
    logits = {run: _logits(out, run, world) for run in (DENSE_CE, DENSE_BATCH_CE)}
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    figure.suptitle(
        "kway demo: characters in font styles that are not in the training data", fontsize=15
    )
    axes = figure.subplots(2, 2)
    class_id = _typical_class(list(logits.values()))
    for ax, (run, found) in zip(axes[0], logits.items(), strict=True):
        _draw_one_class(ax, run.loss, found, class_id)
    _draw_one_threshold(axes[1][0], logits)
    _draw_tree(axes[1][1], out)
    figure.savefig(path, dpi=110)


def _logits(out: Path, run: DemoRun, world: World) -> Logits:
    trained = open_trained(run.folder(out), world)
    recipe, task = trained.recipe, trained.task
    data = recipe.data
    with open_split(data.shards, data.eval_split, cache=data.cache) as split:
        batches = EvalLoader(split, recipe.data, batch=recipe.evaluation.batch)
        features = torch.cat([task.features(batch.inputs) for batch in batches])
        logits = np.empty((len(split), split.num_classes), dtype=np.float32)
        for block in task.head.class_rows():
            logits[:, block.class_ids.numpy()] = task.head.logits(features, block).numpy()
        return Logits(logits, split.labels.copy(), tuple(info.name for info in split.classes))


def _typical_class(found: list[Logits]) -> int:
    """Of the classes with the most held-out images, the one whose total AUPRC is the median."""
    labels = found[0].labels
    counts = np.bincount(labels)
    class_ids = torch.from_numpy(np.flatnonzero(counts == counts.max()))
    precision = sum(
        block_measures(
            torch.from_numpy(each.logits[:, class_ids]), torch.from_numpy(labels), class_ids
        ).average_precision
        for each in found
    )
    assert isinstance(precision, torch.Tensor)
    return int(class_ids[precision.argsort(stable=True)[len(class_ids) // 2]])


def _draw_one_class(ax: Axes, loss: str, logits: Logits, class_id: int) -> None:
    column, own = logits.logits[:, class_id], logits.labels == class_id
    one_class = torch.from_numpy(column)[:, None], torch.from_numpy(logits.labels)
    threshold = float(block_measures(*one_class, torch.tensor([class_id]), [_RECALL]).threshold)
    above = int((column[~own] >= threshold).sum())
    ax.hist(column[~own], bins=60, color=_FALSE, label=f"{(~own).sum():,} images of other classes")
    ax.set_yscale("symlog", linthresh=1)
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    top = ax.get_ylim()[1]
    ax.set_ylim(0, 12 * top)  # leave space for the legend
    ax.vlines(column[own], 0, top, color=_TRUE, lw=2, label=f"{own.sum()} images of this class")
    ax.axvline(threshold, color=_LINE, ls="--", lw=1.5, label=f"threshold for recall {_RECALL:g}")
    ax.set(
        title=f"Loss {loss}: logit of the class “{logits.names[class_id]}”\n"
        f"{above} images of other classes reach the threshold",
        xlabel="logit",
        ylabel="number of images",
    )
    ax.legend(loc="upper left", fontsize=9)


def _draw_one_threshold(ax: Axes, found: dict[DemoRun, Logits]) -> None:
    """Plot precision against recall with one threshold for all classes. The precision is high only
    if logits are comparable across classes and images.
    """
    for run, logits in found.items():
        own = np.zeros(logits.logits.shape, dtype=bool)
        own[np.arange(len(own)), logits.labels] = True
        order = np.argsort(-logits.logits, axis=None, kind="stable")
        hits = own.ravel()[order].cumsum()
        last = np.flatnonzero(own.ravel()[order])  # ranks at which recall increases
        recall, precision = hits[last] / len(own), hits[last] / (last + 1)
        label = f"loss {run.loss}: AUPRC {precision.mean():.1%}"
        ax.plot(recall, precision, color=_COLORS[run], lw=2, label=label)
    ax.set(
        title="One threshold for all classes:\nare logits comparable across images and classes?",
        xlabel="recall over all (image, class) pairs",
        ylabel="precision",
        xlim=(0, 1),
        ylim=(0, 1.02),
    )
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
    ax.legend(loc="lower left")


def _draw_tree(ax: Axes, out: Path) -> None:
    names = {"top1": "top-1 accuracy", "sa": "similarity\naccuracy (SA)", "auprc": "AUPRC"}
    for offset, run in ((-0.2, DENSE_CE), (0.2, VTREE_CE)):
        measures = run.measures(out)
        values = [measures[name] for name in names]
        bars = ax.bar(
            np.arange(len(names)) + offset, values, 0.38, color=_COLORS[run], label=run.name
        )
        ax.bar_label(bars, fmt="{:.1%}")
    ax.set_xticks(range(len(names)), list(names.values()))
    ax.set_yticks(np.linspace(0, 1, 6))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(title="Class weights: dense, or a V-tree over the characters' names", ylim=(0, 1.2))
    ax.legend(loc="upper right")
