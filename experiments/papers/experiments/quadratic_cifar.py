"""Paper 001, Figures 1 to 3: quadratic losses on 25 and 100 classes of CIFAR-100."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from data.shards.hierarchy import PATH
from experiments.papers.budget import Budget
from experiments.papers.comparison import (
    Compared,
    Comparison,
    Rates,
    Run,
    advantage,
    grid,
    mean_of,
    values,
)
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.cifar import Cifar, cifar, drops
from experiments.papers.intervals import Mean, difference
from experiments.papers.job import Folders, Job, Measures
from experiments.papers.published import published
from experiments.papers.section import Claim, Kind, Section, Table, paired
from experiments.papers.shards import CIFAR_100, Dataset

_LOSSES = ("ce", "quadratic", "ccql")
_MAMMALS = (
    "aquatic_mammals",
    "small_mammals",
    "medium_mammals",
    "large_carnivores",
    "large_omnivores_and_herbivores",
)
_FEW, _ALL = 25, 100
_SCENES = {
    "random": f"{_FEW} random classes",
    "mammals": f"{_FEW} mammals",
    "all": f"all {_ALL} classes",
}
_IMAGES_PER_CLASS = 100
# The learning rate is divided by 4 at the end of epochs 50, 80, 110, 150 and 170 of 200.
_EPOCHS, _DROPS = 200, (50, 80, 110, 150, 170)
_FULL_STEPS = _EPOCHS * 45_000 // 128
_STYLES = {
    "ce": ("tab:blue", "o", "-"),
    "quadratic": ("tab:red", "s", "--"),
    "ccql": ("tab:green", "^", "-."),
}


def class_names(_settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Return CIFAR-100's classes and their coarse classes (a job)."""
    from data.sources import Cifar100

    classes = Cifar100(folders.data / Cifar100.archive).classes()
    coarse = [info.attributes[PATH] for info in classes]
    return {"names": [info.name for info in classes], "coarse": coarse}


def scenes(names: Sequence[str], coarse: Sequence[str]) -> dict[str, tuple[str, ...] | None]:
    """Return the classes of each scene; None means all classes.

    The random classes are a single draw without replacement.
    """
    drawn = np.random.default_rng(0).choice(len(names), _FEW, replace=False)
    mammals = [name for name, of in zip(names, coarse, strict=True) if of in _MAMMALS]
    return {
        "random": tuple(names[i] for i in sorted(drawn)),
        "mammals": tuple(mammals),
        "all": None,
    }


def _arm(scene: str, loss: str) -> str:
    return f"{scene} {loss}"


@dataclass(frozen=True)
class _Design:
    """An arm is a scene and a loss.

    All scenes have the same number of images per class and, apart from the validation split, the
    same number of epochs.
    """

    cifar: Cifar
    scenes: Mapping[str, tuple[str, ...] | None]

    def dataset(self, arm: str) -> Dataset:
        classes = self.scenes[arm.split()[0]]
        share = 1 if classes is None else len(classes) / _ALL
        # At the published sizes there are no limits: all images are used.
        limits = {split: round(share * limit) for split, limit in self.cifar.limits.items()}
        validation = round(share * self.cifar.of().validation)
        return self.cifar.of(classes=classes, limits=limits, validation=validation)

    def recipe(self, run: Run) -> Mapping[str, Any]:
        scene, loss = run.arm.split()
        recipe = self.cifar.recipe(run, loss={"kind": loss})
        classes = self.scenes[scene]
        steps = run.steps if classes is None else max(2, run.steps * len(classes) // _ALL)
        recipe["train"]["duration"] = {"steps": steps}
        recipe["schedule"] = drops(steps, [epoch / _EPOCHS for epoch in _DROPS], 1 / 4)
        recipe["telemetry"] = {"log_every": max(1, steps // 40)}
        return recipe


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    listing = Job("experiments.quadratic_cifar:class_names", {})
    found = (yield [listing])[listing]
    network = cifar(
        budget,
        {"model_type": "wide_resnet", "depth": 28, "width": 10},
        "WRN-28-10",
        train=_IMAGES_PER_CLASS * _ALL,
    )
    design = _Design(network, scenes(found["names"], found["coarse"]))
    comparison = Comparison(
        design,
        [_arm(scene, loss) for scene in _SCENES for loss in _LOSSES],
        candidates=grid((0.1, 0.03, 0.01, 0.003), (5e-4,)),
        shared=Rates(0.01, 5e-4),
        measures=("top1",),
        also=("train",),
    )
    compared = yield from comparison.procedure(
        budget,
        steps=budget.size(700, full=_FULL_STEPS, least=8),
        search_steps=budget.size(240, full=_FULL_STEPS // 20, least=8),
    )
    return _section(design, compared, plots)


def _section(design: _Design, compared: Compared, plots: PlotFolder) -> Section:
    sizes = ", ".join(
        f"{compared.samples[_arm(scene, 'ce')]['train']:,} ({label})"
        for scene, label in _SCENES.items()
    )
    accuracies = plots.save(
        f"{EXPERIMENT.name}-accuracy",
        _accuracies(compared),
        title="Accuracy on training images (filled) and test images (hollow), best rate of each "
        "loss.",
        alt_text="Points with error bars for three losses on random classes, mammals and all "
        "classes.",
    )
    curves = plots.save(
        f"{EXPERIMENT.name}-curves",
        _curves(compared),
        title="Training loss relative to that of a network whose logits are all 0, at the best "
        "rate.",
        alt_text="Three panels with one curve per loss over the fraction of the training steps.",
    )
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=(
            f"{design.cifar.description()}. Training images: {sizes}. ccql uses w = sqrt(K - 1) "
            f"- 1. {compared.setup()} These numbers of steps are for {_ALL} classes; with {_FEW} "
            f"classes, they are multiplied by {_FEW / _ALL:g}. The rate is divided by 4 at the "
            "same points in training as in the paper: after "
            f"{', '.join(str(epoch) for epoch in _DROPS[:-1])} and {_DROPS[-1]} of {_EPOCHS} equal "
            "parts."
        ),
        claims=_claims(compared, design.cifar.kind),
        tables=[_table(compared, own=True), _table(compared, own=False)],
        plots=[accuracies, curves],
        remarks=[
            f"The {_FEW} random classes are a single draw, used for all losses and seeds.",
            "The paper tunes the learning rate of each experiment by hand and does not state the "
            "rates. We chose the shared rate.",
            "The paper gives numerical results only in its text; the tables show them in "
            "parentheses.",
        ],
    )


def _claims(compared: Compared, kind: Kind) -> list[Claim]:
    best = compared.at_best
    claim = partial(paired, kind=kind, points=True)
    edges = compared.best.edges

    def over(scene: str, ours: str, theirs: str, measure: str = "top1") -> Mean:
        return advantage(best[_arm(scene, ours)], best[_arm(scene, theirs)], measure)

    return [
        claim(
            f"ccql is closer to ce than to quadratic (test accuracy, {_SCENES['all']})",
            _nearer(compared),
            note=edges("all ce", "all quadratic", "all ccql"),
        ),
        claim(
            f"ccql beats quadratic on training images ({_SCENES['all']})",
            over("all", "ccql", "quadratic", "train/top1"),
            note=edges("all ccql", "all quadratic"),
        ),
        claim(
            f"ccql beats quadratic (test accuracy, {_SCENES['random']})",
            over("random", "ccql", "quadratic"),
            note=edges("random ccql", "random quadratic"),
        ),
        claim(
            f"ce beats ccql (test accuracy, {_SCENES['random']})",
            over("random", "ce", "ccql"),
            note=edges("random ce", "random ccql"),
        ),
        claim(
            f"from {_FEW} to {_ALL} classes, quadratic loses a larger fraction of its test "
            "accuracy than ce",
            _lost_more(compared),
            note=edges("all ce", "all quadratic", "random ce", "random quadratic"),
        ),
        claim(
            f"quadratic is worse on {_SCENES['mammals']} than on {_SCENES['random']} (test "
            "accuracy, one draw of classes)",
            advantage(
                best[_arm("random", "quadratic")], best[_arm("mammals", "quadratic")], "top1"
            ),
            note=edges("random quadratic", "mammals quadratic"),
        ),
    ]


def _tests(compared: Compared, scene: str, loss: str) -> np.ndarray:
    return np.array(values(compared.at_best[_arm(scene, loss)], "top1", diverged=0.0))


def _nearer(compared: Compared) -> Mean:
    """Return how much farther ccql is from quadratic than from ce, paired by seed."""
    ce, quadratic, ccql = (_tests(compared, "all", loss) for loss in _LOSSES)
    return difference(list(abs(ccql - quadratic)), list(abs(ce - ccql)))


def _lost_more(compared: Compared) -> Mean:
    """Return how much larger quadratic's relative loss of accuracy is than ce's.

    The loss of accuracy is relative to the accuracy on 25 classes, or to chance level if that is
    higher.
    """
    ce, quadratic = (
        1 - _tests(compared, "all", loss) / np.maximum(_tests(compared, "random", loss), 1 / _FEW)
        for loss in ("ce", "quadratic")
    )
    return difference(list(quadratic), list(ce))


def _table(compared: Compared, *, own: bool) -> Table:
    rows = []
    for scene, label in _SCENES.items():
        for loss in _LOSSES:
            runs = (compared.at_best if own else compared.at_shared)[_arm(scene, loss)]
            printed = published("001", "figures 1 to 3").get(scene, {}).get(loss, {})
            cells = []
            for split, measure in (("train", "train/top1"), ("test", "top1")):
                shown = mean_of(runs, measure).percent()
                cells.append(f"{shown} ({printed[split]})" if split in printed else shown)
            diverged = sum("diverged" in run for run in runs)
            rate = [compared.best.chosen[_arm(scene, loss)].text()] if own else []
            rows.append([label, loss, *cells, f"{diverged} of {len(runs)}", *rate])
    which = "best rate of each loss" if own else f"shared rate {compared.shared.lr:g}"
    header = ["classes", "loss", "training", "test", "diverged", *(["rate, decay"] if own else [])]
    return Table(
        f"Accuracy in percent, {which} (numbers from the paper's text in parentheses)", header, rows
    )


def _accuracies(compared: Compared) -> Figure:
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for index, loss in enumerate(_LOSSES):
        color, marker, _ = _STYLES[loss]
        for measure, filled in (("train/top1", True), ("top1", False)):
            means = [mean_of(compared.at_best[_arm(scene, loss)], measure) for scene in _SCENES]
            axes.errorbar(
                [number + 0.2 * (index - 1) for number in range(len(_SCENES))],
                [100 * one.value for one in means],
                yerr=[100 * one.half for one in means],
                fmt=marker,
                color=color,
                markerfacecolor=color if filled else "white",
                capsize=3,
                label=f"{loss}, {'training' if filled else 'test'}",
            )
    axes.set_xticks(range(len(_SCENES)), list(_SCENES.values()))
    axes.set_ylabel("top-1 accuracy, %")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def _curves(compared: Compared) -> Figure:
    figure = Figure(figsize=(9, 3.5))
    for axes, (scene, label) in zip(figure.subplots(1, 3), _SCENES.items(), strict=True):
        for loss in _LOSSES:
            runs = [run for run in compared.at_best[_arm(scene, loss)] if "curve" in run]
            if not runs:
                continue
            color, _, line = _STYLES[loss]
            steps = np.array(runs[0]["curve"]["steps"])
            losses = np.mean([run["curve"]["losses"] for run in runs], axis=0)
            start = loss_of_zero(loss, _ALL if scene == "all" else _FEW)
            axes.plot(steps / steps[-1], losses / start, line, color=color, label=loss)
        axes.set_title(label, fontsize=10)
        axes.set_xlabel("fraction of training steps")
        axes.set_yscale("log")
    first = figure.axes[0]
    first.set_ylabel("training loss / loss at zero logits")
    first.legend(fontsize=8)
    figure.tight_layout()
    return figure


def loss_of_zero(loss: str, num_classes: int) -> float:
    """Return the loss of a network whose logits are all 0 (Eq. II.1 with w = sqrt(K - 1) - 1)."""
    match loss:
        case "ce":
            return log(num_classes)
        case "quadratic":
            return 1 / 2
        case _:
            return float(np.sqrt(num_classes - 1)) / 2


EXPERIMENT = Experiment(
    name="001-cifar100",
    paper="001",
    title="Quadratic losses on CIFAR-100 (Figures 1 to 3)",
    minutes=3,
    full="WRN-28-10 on all images for the paper's number of epochs",
    wants_gpu=True,
    procedure=_procedure,
    needs=(CIFAR_100,),
)
