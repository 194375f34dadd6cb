"""The plots of the report by section, each with a title and alternative text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from matplotlib.figure import Figure

from launch.report.charts import Curve, Mark, Marked, draw_curves, draw_shares, draw_values
from launch.report.numbers import format_number, measure_names, share_of_phases
from launch.report.reading import Run, training_seconds
from launch.report.steps import Event

_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_MOST_BARS = 8  # with more runs, values are shown only in the table
_GIB = 2**30


@dataclass(frozen=True)
class Plot:
    """A plot with alternative text for screen readers (`alt_text`) and a caption (`note`)."""

    title: str
    figure: Figure
    alt_text: str
    note: str = ""


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
        label = f"{unit} of training"
        drawn = draw_curves(curves, x_label=label, y_label="loss", log="if wide")
        note = "Time in steps alone: evaluations and checkpoints are left out."
        yield Plot("Loss over time", drawn, _ends("Loss over time", curves), note)
    yield from _over_steps(
        runs, axis, "learning_rate", "Learning rate", "rate", smooth=False, from_zero=True
    )
    yield from _over_steps(runs, axis, "gradient_norm", "Gradient norm", "norm", log=True)


def accuracy(runs: Sequence[Run]) -> Iterator[Plot]:
    """Bars for the newest evaluation's measures; curves for measures with several evaluations."""
    axis, names = axis_of(runs), measure_names(runs)
    if not names:
        return
    rows = [
        [(run.number, run.letter, latest[name]) for run in runs if name in (latest := _latest(run))]
        for name in names
    ]
    note = "; ".join(f"{number} {name}" for number, name in enumerate(names, start=1))
    alt_text = "; ".join(
        f"{name}: " + ", ".join(f"{letter} {format_number(value)}" for _, letter, value in row)
        for name, row in zip(names, rows, strict=True)
    )
    if len(runs) <= _MOST_BARS:
        yield Plot("Newest evaluation", draw_values(rows), alt_text, note)
    for name in names:
        curves = [_measured(run, axis, name) for run in runs]
        if any(len(curve.x) > 1 for curve in curves):
            drawn = draw_curves(curves, x_label=axis.label, y_label="", smooth=False)
            yield Plot(name, drawn, _ends(name, curves))


def single_logits(runs: Sequence[Run]) -> Iterator[Plot]:
    """Distribution over classes of the single-logit measures in the newest evaluation."""
    yield from _of_classes(runs, "AUPRC of the classes", _average_precision)
    found = [run.evaluations.classes for run in runs]
    recalls = dict.fromkeys(r for classes in found if classes is not None for r in classes.recalls)
    for recall in recalls:
        title = f"Precision at recall {recall:g} of the classes"
        yield from _of_classes(runs, title, partial(_precision_at, recall))


def speed(runs: Sequence[Run]) -> Iterator[Plot]:
    """Throughput, time waiting for data, phases, device utilization and memory."""
    axis = axis_of(runs)
    yield from _over_steps(
        runs, axis, "samples_per_second", "Throughput", "samples a second", from_zero=True
    )
    yield from _phases(runs)
    yield from _over_steps(
        runs, axis, "data_wait_ratio", "Waiting for data", "share of the time", from_zero=True
    )
    yield from _over_steps(runs, axis, "mfu", "Model FLOPs utilisation", "share", from_zero=True)
    memory = {"resident": "Memory of rank 0", "device_reserved": "Device memory of rank 0"}
    for kind, title in memory.items():
        yield from _over_steps(
            runs, axis, f"memory.{kind}", title, "GiB", unit=_GIB, smooth=False, from_zero=True
        )


SECTIONS: dict[str, Callable[[Sequence[Run]], Iterator[Plot]]] = {
    "Learning": learning,
    "Accuracy": accuracy,
    "One logit alone": single_logits,
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
) -> Iterator[Plot]:
    """The plot of one column, if any run has it."""
    curves = [_curve(run, axis.of(run, run.steps.column("step")), name, unit) for run in runs]
    if not _any(curves):
        return
    drawn = draw_curves(
        curves,
        x_label=axis.label,
        y_label=y_label,
        marked=marked,
        log=log,
        smooth=smooth,
        from_zero=from_zero,
    )
    yield Plot(title, drawn, _ends(f"{title} over {axis.label}", curves), _legend(marked))


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
    again = np.flatnonzero(np.diff(restarts, prepend=0) > 0)
    positions.setdefault("restart", []).extend(steps[again].tolist())
    for mark, steps_of in positions.items():
        if steps_of:
            yield Marked(
                run.number, mark, axis.of(run, np.array(steps_of, dtype=np.float64)).tolist()
            )


def _mark(event: Event) -> Mark | None:
    match event.name:
        case "evaluation":
            return None  # evaluations have their own plots
        case "checkpoint" | "refused":
            return event.name
        case "start" | "resume" | "restart":
            return "restart" if event.step else None
    return "other"


def _legend(marked: Sequence[Marked]) -> str:
    shown = {
        "checkpoint": "▲ checkpoint",
        "restart": "┆ start anew",
        "refused": "✕ refused",
        "other": "◆ other event",
    }
    there = {event.mark for event in marked}
    return ", ".join(label for mark, label in shown.items() if mark in there)


def _of_classes(
    runs: Sequence[Run], title: str, values_of: Callable[[Run], np.ndarray | None]
) -> Iterator[Plot]:
    """The sorted values of the classes: the share of classes that reach each value."""
    curves = []
    for run in runs:
        values = values_of(run)
        if values is not None and len(values):
            share = np.arange(1, len(values) + 1) / len(values)
            curves.append(Curve(run.number, run.letter, share, np.sort(values)[::-1]))
    if not curves:
        return
    drawn = draw_curves(
        curves, x_label="share of the classes", y_label="at least", smooth=False, shares=True
    )
    medians = ", ".join(f"{c.letter} median {format_number(float(np.median(c.y)))}" for c in curves)
    yield Plot(title, drawn, f"{title}, sorted: {medians}")


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
    note = "; ".join(f"{number} {part}" for number, part in enumerate(parts, start=1))
    without = [run.letter for run in runs if not share_of_phases(run)]
    if without:
        note += f". Not recorded: {', '.join(without)}"
    alt_text = "; ".join(
        f"{letter}: " + ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
        for letter, shares in rows
    )
    yield Plot("Where the time goes", draw_shares(rows, parts), alt_text, note)


def _any(curves: Sequence[Curve]) -> bool:
    return any((np.isfinite(curve.x) & np.isfinite(curve.y)).any() for curve in curves)


def _ends(title: str, curves: Sequence[Curve]) -> str:
    ends = []
    for curve in curves:
        known = curve.y[np.isfinite(curve.y)]
        if len(known):
            ends.append(
                f"{curve.letter} goes from {format_number(known[0])} to {format_number(known[-1])}"
            )
    return f"{title}: {', '.join(ends)}"
