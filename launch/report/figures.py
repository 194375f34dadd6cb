"""The plots of the report by section, each with a title and alternative text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from matplotlib.figure import Figure

from launch.measures import is_ratio, measure_label
from launch.report.charts import Bar, Curve, Mark, Marked, draw_curves, draw_ratios, draw_shares
from launch.report.numbers import (
    format_measure,
    format_number,
    format_percent,
    measure_names,
    share_of_phases,
)
from launch.report.reading import Run, training_seconds
from launch.report.steps import Event

_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_MAX_BARS = 8  # with more runs, the table alone shows the values
_GIB = 2**30


@dataclass(frozen=True)
class Plot:
    """A plot with alternative text for screen readers (`alt_text`) and a caption (`note`).

    title: empty for the only plot of a section. legend: the names of the parts of stacked bars, in
    the order of their colors.
    """

    title: str
    figure: Figure
    alt_text: str
    note: str = ""
    legend: tuple[str, ...] = ()


@dataclass(frozen=True)
class Axis:
    """The x axis of training curves: steps, or samples if the runs' batch sizes differ."""

    label: str
    scale: dict[str, float]

    def of(self, run: Run, steps: np.ndarray) -> np.ndarray:
        return steps * self.scale[run.letter]


def axis_of(runs: Sequence[Run]) -> Axis:
    """Steps if all runs have the same batch size, otherwise samples."""
    batches = {run.letter: _batch(run) for run in runs}
    if len({batch for batch in batches.values() if batch}) <= 1:
        return Axis("steps", dict.fromkeys(batches, 1.0))
    return Axis("samples", {letter: batch or np.nan for letter, batch in batches.items()})


def _batch(run: Run) -> float | None:
    steps, samples = run.steps.column("step"), run.steps.column("samples")
    known = np.isfinite(samples) & (steps > 0)
    return float((samples[known] / steps[known])[-1]) if known.any() else None


def learning(runs: Sequence[Run]) -> Iterator[Plot]:
    """Loss over steps and over time, learning rate and gradient norm."""
    axis = axis_of(runs)
    marks = [mark for run in runs for mark in _marks(run, axis)]
    yield from _over_steps(runs, axis, "loss", "Loss", "loss", marked=marks, log="if wide")
    unit, size = _unit_of_time(runs)
    curves = [_curve(run, _seconds(run) / size, "loss") for run in runs]
    if _any(curves):
        label = f"training time ({unit})"
        figure = draw_curves(curves, x_label=label, y_label="loss", log="if wide")
        note = "The time does not include evaluations or checkpoints."
        yield Plot("Loss over time", figure, _ends("Loss over time", curves), note)
    yield from _over_steps(
        runs, axis, "learning_rate", "Learning rate", "learning rate", smooth=False, from_zero=True
    )
    yield from _over_steps(runs, axis, "gradient_norm", "Gradient norm", "gradient norm", log=True)


def latest_evaluation(runs: Sequence[Run]) -> Iterator[Plot]:
    """Bars for the metrics of the latest evaluation.

    Only ratios get bars, because other metrics do not have a common scale.
    """
    latest = {run.letter: _latest(run) for run in runs}
    groups = [
        (
            measure_label(name),
            [
                Bar(run.number, run.letter, latest[run.letter][name])
                for run in runs
                if name in latest[run.letter]
            ],
        )
        for name in measure_names(runs)
        if is_ratio(name)
    ]
    groups = [(label, bars) for label, bars in groups if bars]
    if len(runs) > _MAX_BARS or not groups:
        return
    alt_text = "; ".join(
        f"{label}: " + ", ".join(f"{bar.letter} {format_percent(bar.value)}" for bar in bars)
        for label, bars in groups
    )
    yield Plot("", draw_ratios(groups), alt_text, _steps_of_latest(runs))


def accuracy(runs: Sequence[Run]) -> Iterator[Plot]:
    """Curves of the metrics, if a run has several evaluations."""
    axis = axis_of(runs)
    for name in measure_names(runs):
        curves = [_measured(run, axis, name) for run in runs]
        if any(len(curve.x) > 1 for curve in curves):
            label, percent = measure_label(name), is_ratio(name)
            y_label = label if percent else "value"  # the font may lack characters of other names
            figure = draw_curves(
                curves, x_label=axis.label, y_label=y_label, smooth=False, percent=percent
            )
            format_ = partial(format_measure, name)
            yield Plot(_capitalized(label), figure, _ends(label, curves, format_))


def _steps_of_latest(runs: Sequence[Run]) -> str:
    evaluated = [run for run in runs if run.evaluations.measures]
    steps = [max(run.evaluations.measures) for run in evaluated]
    if len(set(steps)) == 1:
        return f"Evaluated at step {steps[0]:,}."
    shown = (f"{run.letter} at step {step:,}" for run, step in zip(evaluated, steps, strict=True))
    return f"Evaluated: {', '.join(shown)}."


def _capitalized(label: str) -> str:
    return label[:1].upper() + label[1:]


def single_logits(runs: Sequence[Run]) -> Iterator[Plot]:
    """Distribution of the latest evaluation's single-logit metrics over the classes."""
    yield from _of_classes(runs, "AUPRC per class", "AUPRC", _average_precision)
    found = [run.evaluations.classes for run in runs]
    recalls = dict.fromkeys(r for classes in found if classes is not None for r in classes.recalls)
    for recall in recalls:
        title = f"Precision at recall {recall:g} per class"
        yield from _of_classes(runs, title, "precision", partial(_precision_at, recall))


def speed(runs: Sequence[Run]) -> Iterator[Plot]:
    """Throughput, time spent waiting for data, device utilization, memory and phases."""
    axis = axis_of(runs)
    yield from _over_steps(
        runs, axis, "samples_per_second", "Throughput", "samples/s", from_zero=True
    )
    yield from _over_steps(
        runs,
        axis,
        "data_wait_ratio",
        "Time waiting for data",
        "share of the step time",
        from_zero=True,
        percent=True,
    )
    yield from _over_steps(
        runs,
        axis,
        "mfu",
        "Model FLOPs utilization (MFU)",
        "share of the device's peak",
        from_zero=True,
        percent=True,
    )
    memory = {"resident": "Host memory of rank 0", "device_reserved": "GPU memory of rank 0"}
    for kind, title in memory.items():
        yield from _over_steps(
            runs,
            axis,
            f"memory.{kind}",
            title,
            "memory (GiB)",
            unit=_GIB,
            smooth=False,
            from_zero=True,
        )
    yield from _phases(runs)


# The sections of the page after the summary, by title.
SECTIONS: dict[str, Callable[[Sequence[Run]], Iterator[Plot]]] = {
    "Learning": learning,
    "Accuracy": accuracy,
    "Single-class accuracy": single_logits,
    "Speed and memory": speed,
}


def _over_steps(
    runs: Sequence[Run],
    axis: Axis,
    name: str,
    title: str,
    y_label: str,
    *,
    unit: float = 1,
    marked: Sequence[Marked] = (),
    log: bool | Literal["if wide"] = False,
    smooth: bool = True,
    from_zero: bool = False,
    percent: bool = False,
) -> Iterator[Plot]:
    """A plot of one column, if any run has this column."""
    curves = [_curve(run, axis.of(run, run.steps.column("step")), name, unit) for run in runs]
    if not _any(curves):
        return
    figure = draw_curves(
        curves,
        x_label=axis.label,
        y_label=y_label,
        marked=marked,
        log=log,
        smooth=smooth,
        from_zero=from_zero,
        percent=percent,
    )
    alt_text = _ends(
        f"{title} over {axis.label}", curves, format_percent if percent else format_number
    )
    yield Plot(title, figure, alt_text, _legend(marked))


def _curve(run: Run, x: np.ndarray, name: str, unit: float = 1) -> Curve:
    return Curve(run.number, run.letter, x, run.steps.column(name) / unit)


def _seconds(run: Run) -> np.ndarray:
    """Cumulative seconds spent in steps at each logged step; all NaN if no time was recorded."""
    spent = np.diff(run.steps.column("step"), prepend=0) * run.steps.column("step_seconds")
    return np.where(np.isfinite(spent).any(), np.cumsum(np.nan_to_num(spent)), np.nan)


def _unit_of_time(runs: Sequence[Run]) -> tuple[str, float]:
    longest = max(training_seconds(run.steps) for run in runs)
    return next((unit, size) for unit, size in _UNITS if longest >= 2 * size or size == 1)


def _measured(run: Run, axis: Axis, name: str) -> Curve:
    found = {step: m[name] for step, m in run.evaluations.measures.items() if name in m}
    x = axis.of(run, np.array(list(found), dtype=np.float64))
    return Curve(run.number, run.letter, x, np.array(list(found.values()), dtype=np.float64))


def _latest(run: Run) -> dict[str, float]:
    return next(reversed(run.evaluations.measures.values()), {})


def _marks(run: Run, axis: Axis) -> Iterator[Marked]:
    positions: dict[Mark, list[float]] = {}
    for event in run.steps.events:
        if (mark := _mark(event)) is not None:
            positions.setdefault(mark, []).append(event.step)
    steps, restarts = run.steps.column("step"), run.steps.column("restarts")
    increases = np.flatnonzero(np.diff(restarts, prepend=0) > 0)
    positions.setdefault("restart", []).extend(steps[increases].tolist())
    for mark, steps_of in positions.items():
        if steps_of:
            yield Marked(
                run.number, mark, axis.of(run, np.array(steps_of, dtype=np.float64)).tolist()
            )


def _mark(event: Event) -> Mark | None:
    match event.name:
        case "evaluation":
            return None  # evaluations have their own plots
        case "checkpoint":
            return "checkpoint"
        case "refused":  # a checkpoint that failed verification on resume
            return "damaged"
        case "start" | "resume" | "restart":
            return "restart" if event.step else None
    return "other"


def _legend(marked: Sequence[Marked]) -> str:
    shown = {
        "checkpoint": "▲ checkpoint",
        "restart": "┆ restart",
        "damaged": "✕ damaged checkpoint skipped",
        "other": "◆ other event",
    }
    marks = {event.mark for event in marked}
    return ", ".join(label for mark, label in shown.items() if mark in marks)


def _of_classes(
    runs: Sequence[Run], title: str, measure: str, values_of: Callable[[Run], np.ndarray | None]
) -> Iterator[Plot]:
    """The values of the classes in descending order, as a function of the share of classes."""
    curves = []
    for run in runs:
        values = values_of(run)
        if values is not None and len(values):
            share = np.arange(1, len(values) + 1) / len(values)
            curves.append(Curve(run.number, run.letter, share, np.sort(values)[::-1]))
    if not curves:
        return
    figure = draw_curves(
        curves, x_label="share of classes", y_label=measure, smooth=False, shares=True
    )
    medians = ", ".join(f"{c.letter} {format_percent(float(np.median(c.y)))}" for c in curves)
    note = f"Classes in descending order. Median: {medians}."
    yield Plot(title, figure, f"{title}. {note}", note)


def _average_precision(run: Run) -> np.ndarray | None:
    classes = run.evaluations.classes
    return None if classes is None else classes.average_precision


def _precision_at(recall: float, run: Run) -> np.ndarray | None:
    classes = run.evaluations.classes
    if classes is None or recall not in classes.recalls:
        return None
    column: np.ndarray = classes.precision_at[:, classes.recalls.index(recall)]
    return column


def _phases(runs: Sequence[Run]) -> Iterator[Plot]:
    rows = [(run.letter, shares) for run in runs if (shares := share_of_phases(run))]
    if not rows:
        return
    parts = list(dict.fromkeys(part for _, shares in rows for part in shares))
    without = [run.letter for run in runs if not share_of_phases(run)]
    note = f"Not recorded: {', '.join(without)}." if without else ""
    alt_text = "; ".join(
        f"{letter}: " + ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
        for letter, shares in rows
    )
    yield Plot("Time by phase", draw_shares(rows, parts), alt_text, note, tuple(parts))


def _any(curves: Sequence[Curve]) -> bool:
    return any((np.isfinite(curve.x) & np.isfinite(curve.y)).any() for curve in curves)


def _ends(
    title: str, curves: Sequence[Curve], format_: Callable[[float], str] = format_number
) -> str:
    ends = []
    for curve in curves:
        finite = curve.y[np.isfinite(curve.y)]
        if len(finite):
            ends.append(f"{curve.letter} from {format_(finite[0])} to {format_(finite[-1])}")
    return f"{title}: {', '.join(ends)}"
