"""The report page: one self-contained HTML file without scripts.

Jinja escapes all text that comes from a run, such as metric names.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import matplotlib.style
import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from data.messages import pluralize, printable
from launch.measures import is_ratio, measure_label
from launch.report.plots import COLORS, STYLE, Curve, as_svg, draw_curves, draw_shares
from launch.report.reading import Run
from trainer.telemetry.phases import OUTSIDE_STEPS, PHASES

_UNKNOWN = "–"
_WORST = 10


class Part(NamedTuple):
    """A plot or a table of the page, in a frame if it has a title. run: shown before the title.
    heads: the columns of the table, each a run or a text. note: shown below a plot."""

    title: str = ""
    run: Run | None = None
    svg: Markup | None = None
    note: str = ""
    heads: Sequence[Run | str] = ()
    rows: Sequence[Sequence[str]] = ()


def report_page(runs: Sequence[Run]) -> str:
    """The complete page."""
    # The default style, and not the user's own settings.
    with matplotlib.style.context(["default", STYLE]):
        sections = {
            "Summary": [_runs_table(runs, summary(runs))],
            "Recipe differences": list(_differences(runs)),
            "Learning": list(_learning(runs)),
            "Evaluations": list(_evaluations(runs)),
            "Single-class accuracy": list(_single_logits(runs)),
            "Speed": list(_speed(runs)),
        }
    templates = Environment(
        loader=PackageLoader("launch.report", ""),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    return templates.get_template("page.html").render(
        title=f"kway report: {pluralize(len(runs), 'run')}",
        created=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        colors=COLORS,
        runs=runs,
        sections=sections,
    )


# ------------------------------------------------------------------ tables


def summary(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Rows of the page's first table. Rows without a value in any run are omitted."""

    def last(name: str) -> list[str]:
        return [_shown(run.column(name)[-1:], format_number) for run in runs]

    def median(name: str, form: Callable[[float], str]) -> list[str]:
        columns = [run.column(name)[np.isfinite(run.column(name))] for run in runs]
        return [_shown([np.median(column)] if len(column) else [], form) for column in columns]

    rows: dict[str, list[str]] = {
        "state": ["running" if run.is_running else "not running" for run in runs],
        "steps": last("step"),
        "samples": last("samples"),
        "last loss": last("loss"),
    }
    for name in _measure_names(runs):
        rows[f"best {measure_label(name)}"] = [_best(run, name) for run in runs]
    rows |= {
        "throughput, median": median("samples_per_second", lambda v: f"{format_number(v)}/s"),
        "waiting for data, median": median("data_wait_ratio", "{:.1%}".format),
        "training time": [
            _shown(run.seconds[-1:], lambda s: f"{timedelta(seconds=round(s))}") for run in runs
        ],
        "restarts": last("restarts"),
        "damaged samples": last("bad_samples"),
        "skipped updates": last("skipped_steps"),
    }
    return {name: cells for name, cells in rows.items() if set(cells) != {_UNKNOWN}}


def _best(run: Run, name: str) -> str:
    found = {step: values[name] for step, values in run.measures.items() if name in values}
    if not found:
        return _UNKNOWN
    step = (min if "loss" in name else max)(found, key=found.__getitem__)
    value = f"{found[step]:.1%}" if is_ratio(name) else format_number(found[step])
    return f"{value} at step {step:,}"


def _measure_names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(n for run in runs for found in run.measures.values() for n in found))


def _shown(value: Sequence[float] | np.ndarray, form: Callable[[float], str]) -> str:
    """Format the only item, or return a dash if there is none or it is unknown."""
    return form(float(value[0])) if len(value) and not np.isnan(value[0]) else _UNKNOWN


def format_number(value: float) -> str:
    """Format a number with four significant digits: `0.8312`, `1,250`, `3.10e-05`."""
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e12):
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def _differences(runs: Sequence[Run]) -> Iterator[Part]:
    """The settings that differ between the recipes, except `run`, which always differs."""
    known = [run for run in runs if run.recipe]
    keys = dict.fromkeys(key for run in known for key in run.recipe if key != "run")
    rows = {key: [run.recipe.get(key, _UNKNOWN) for run in known] for key in keys}
    rows = {key: cells for key, cells in rows.items() if len(set(cells)) > 1}
    if len(known) > 1:
        yield _runs_table(known, rows) if rows else Part(note="The recipes are identical.")


def _runs_table(runs: Sequence[Run], rows: dict[str, list[str]]) -> Part:
    return Part(heads=["", *runs], rows=[[name, *cells] for name, cells in rows.items()])


# ------------------------------------------------------------------ plots


def _learning(runs: Sequence[Run]) -> Iterator[Part]:
    """Loss over steps and over time, learning rate and gradient norm."""
    noisy: dict[str, Any] = {"log": True, "smooth": True}
    yield from _over_steps(runs, "loss", "Loss", **noisy)
    longest = max((run.seconds[-1] for run in runs if len(run.seconds)), default=0.0)
    unit, size = ("hours", 3600) if longest >= 7200 else ("minutes", 60)
    curves = [Curve(run, run.seconds / size, run.column("loss")) for run in runs]
    label, note = f"training time ({unit})", "Without evaluations and checkpoints."
    yield from _curves("Loss over time", curves, note, x_label=label, **noisy)
    yield from _over_steps(runs, "learning_rate", "Learning rate", from_zero=True)
    yield from _over_steps(runs, "gradient_norm", "Gradient norm", **noisy)


def _evaluations(runs: Sequence[Run]) -> Iterator[Part]:
    """Curves of the metrics."""
    x_label, scale = axis_of(runs)
    for name in _measure_names(runs):
        curves = []
        for run in runs:
            of = {step: values[name] for step, values in run.measures.items() if name in values}
            x, y = (np.array(list(values), dtype=np.float64) for values in (of, of.values()))
            curves.append(Curve(run, scale[run] * x, y))
        label, percent = measure_label(name), is_ratio(name)
        title = label[:1].upper() + label[1:]
        yield from _curves(title, curves, x_label=x_label, percent=percent)


def _single_logits(runs: Sequence[Run]) -> Iterator[Part]:
    """The classes' AUPRC and precision in descending order, over the share of classes, and the
    classes with the lowest AUPRC."""
    tables = {run: run.classes for run in runs if run.classes is not None}
    columns: dict[str, list[tuple[Run, np.ndarray]]] = {}
    for run, table in tables.items():
        columns.setdefault("AUPRC", []).append((run, table.average_precision))
        for recall, column in zip(table.recalls, table.precision_at.T, strict=True):
            columns.setdefault(f"Precision at recall {recall:g}", []).append((run, column))
    for title, found in columns.items():
        curves = []
        for run, column in found:
            y = np.sort(column[np.isfinite(column)])[::-1]
            curves.append(Curve(run, np.arange(1, len(y) + 1) / len(y), y))
        medians = (f"{c.run.letter} {np.median(c.y):.1%}" for c in curves if len(c.y))
        note = f"Classes in descending order. Median: {', '.join(medians)}."
        label = "share of classes"
        yield from _curves(f"{title} per class", curves, note, x_label=label, percent=True)
    for run, table in tables.items():
        heads = ["class", "samples", "accuracy", "AUPRC", *(f"P@R {r:g}" for r in table.recalls)]
        rows = []
        for j in table.worst(_WORST):
            values = (table.accuracy[j], table.average_precision[j], *table.precision_at[j])
            cells = (f"{value:.1%}" for value in values)
            name = table.names[table.class_ids[j]]
            rows.append([name, f"{table.positives[j]:,}", *cells])
        yield Part("Classes with the lowest AUPRC", run, heads=heads, rows=rows)


def _speed(runs: Sequence[Run]) -> Iterator[Part]:
    """Throughput, time spent waiting for data, and phases."""
    rate: dict[str, Any] = {"from_zero": True, "smooth": True}
    share: dict[str, Any] = {"percent": True, **rate}
    yield from _over_steps(runs, "samples_per_second", "Throughput", y_label="samples/s", **rate)
    yield from _over_steps(runs, "data_wait_ratio", "Share of the time waiting for data", **share)
    shares = {run.letter: found for run in runs if (found := share_of_phases(run))}
    if shares:
        parts = [part for part in (*PHASES, "other") if any(part in s for s in shares.values())]
        yield Part("Time by phase", svg=as_svg(draw_shares(shares, parts), "Time by phase"))


def share_of_phases(run: Run) -> dict[str, float]:
    """Shares that sum to one; `other` is time outside all phases. Empty if no time was recorded."""
    seconds: dict[str, float] = {}
    for phase in PHASES:
        seconds[phase] = float(np.nansum(run.column(f"phases.{phase}")))
    # Evaluations and checkpoints are phases of the run, but not part of a step's time.
    inside = sum(value for phase, value in seconds.items() if phase not in OUTSIDE_STEPS)
    seconds["other"] = max(0.0, float(np.nan_to_num(run.seconds[-1:]).sum()) - inside)
    whole = sum(seconds.values())
    return {phase: value / whole for phase, value in seconds.items() if inside and value > 0}


def axis_of(runs: Sequence[Run]) -> tuple[str, dict[Run, float]]:
    """The x axis of training curves and its units per step of each run: steps, or samples if the
    batch sizes differ."""
    batches = {}
    for run in runs:
        ratio = run.column("samples") / np.maximum(run.column("step"), 1)
        batches[run] = float(ratio[-1]) if len(ratio) else np.nan
    if len({batch for batch in batches.values() if np.isfinite(batch)}) <= 1:
        return "steps", dict.fromkeys(runs, 1.0)
    return "samples", batches


def _over_steps(runs: Sequence[Run], name: str, title: str, **options: Any) -> Iterator[Part]:
    """Plot a column, if any run has it."""
    label, scale = axis_of(runs)
    curves = [Curve(r, scale[r] * r.column("step"), r.column(name)) for r in runs]
    yield from _curves(title, curves, x_label=label, **options)


def _curves(title: str, curves: Sequence[Curve], note: str = "", **options: Any) -> Iterator[Part]:
    """Plot the curves, if any of them has finite points."""
    if finite := [curve for curve in (curve.finite() for curve in curves) if len(curve.x)]:
        yield Part(title, svg=as_svg(draw_curves(finite, **options), title), note=note)
