"""Tables that compare runs: rows by name, one cell per run."""

from collections.abc import Callable, Sequence

import numpy as np

from launch.measures import is_ratio, measure_label
from launch.report.reading import Run, training_seconds
from trainer.telemetry.phases import PHASES

_LOWER_IS_BETTER = ("loss",)
_NO_PHASE = "other"
UNKNOWN = "–"


def format_number(value: float) -> str:
    """Format a number for display: `0.8312`, `1,250`, `3.1e-05`."""
    if not np.isfinite(value):
        return "not finite"
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e12):
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def format_percent(ratio: float) -> str:
    """Format a ratio: `6.1%`."""
    return f"{ratio:.1%}"


def format_measure(name: str, value: float) -> str:
    """Format the value of a metric: `83.1%` for a ratio, otherwise a number."""
    return format_percent(value) if is_ratio(name) else format_number(value)


def format_duration(seconds: float) -> str:
    """Format a duration: `45 s`, `12 min`, `3.4 h`, `2.1 days`."""
    if seconds < 90:
        return f"{seconds:.3g} s"
    for size, unit in ((60, "min"), (3600, "h"), (86400, "days")):
        if seconds < 100 * size or unit == "days":
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError("unreachable: the number of days is unlimited")


def measure_names(runs: Sequence[Run]) -> list[str]:
    """The names of the metrics in all evaluations, with the top-k metrics first."""
    names = dict.fromkeys(
        name for run in runs for found in run.evaluations.measures.values() for name in found
    )
    return sorted(names, key=lambda name: not name.startswith("top"))


def summary_table(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Rows of the page's first table. Rows without a value in any run are omitted."""
    rows = {
        "state": [run.state for run in runs],
        "steps": [format_number(run.last_step) for run in runs],
        "samples": [_last(run, "samples") for run in runs],
        "last loss": [_last(run, "loss") for run in runs],
    }
    for name in measure_names(runs):
        rows[f"best {measure_label(name)}"] = [_best(run, name) for run in runs]
    rows |= {
        "throughput, median": [
            _median(run, "samples_per_second", lambda rate: f"{format_number(rate)} samples/s")
            for run in runs
        ],
        "waiting for data, median": [
            _median(run, "data_wait_ratio", format_percent) for run in runs
        ],
        "MFU, median": [_median(run, "mfu", format_percent) for run in runs],
        "training time": [_duration_or_unknown(training_seconds(run.steps)) for run in runs],
        "wall time, first to last record": [_duration_or_unknown(_elapsed(run)) for run in runs],
        "checkpoints": [format_number(len(run.steps.of("checkpoint"))) for run in runs],
        "restarts": [_last(run, "restarts") for run in runs],
        "damaged samples": [_last(run, "bad_samples") for run in runs],
        "skipped updates": [_last(run, "skipped") for run in runs],
    }
    return {name: cells for name, cells in rows.items() if set(cells) != {UNKNOWN}}


def phases_table(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Each phase's share of the time of all logged steps, by run."""
    shares = {run.letter: share_of_phases(run) for run in runs}
    names = dict.fromkeys(name for found in shares.values() for name in found)
    return {
        name: [
            format_percent(found[name]) if name in found else UNKNOWN for found in shares.values()
        ]
        for name in names
    }


def share_of_phases(run: Run) -> dict[str, float]:
    """Shares that sum to one; `other` is time outside all phases. Empty if no time was recorded."""
    seconds = {name: float(np.nansum(column)) for name, column in run.steps.under("phases").items()}
    known_first = sorted(seconds, key=lambda name: PHASES.index(name) if name in PHASES else 99)
    seconds = {name: seconds[name] for name in known_first if seconds[name] > 0}
    if not seconds:
        return {}
    known = np.isfinite(run.steps.column("step_seconds"))
    counts = np.diff(run.steps.column("step"), prepend=0)
    # Evaluations and checkpoints are phases of the run, but not part of a step's time.
    inside = sum(v for name, v in seconds.items() if name not in ("evaluation", "checkpoint"))
    total = float((counts[known] * run.steps.column("step_seconds")[known]).sum())
    if total > 1.005 * inside:
        seconds[_NO_PHASE] = total - inside
    whole = sum(seconds.values())
    return {name: value / whole for name, value in seconds.items()}


def recipe_differences(recipes: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """Keys whose values differ between recipes, in order of first appearance.

    Omits `run`, which always differs.
    """
    keys = dict.fromkeys(key for recipe in recipes for key in recipe if key != "run")
    table = {key: [recipe.get(key, UNKNOWN) for recipe in recipes] for key in keys}
    return {key: values for key, values in table.items() if len(set(values)) > 1}


def _best(run: Run, name: str) -> str:
    found = {step: m[name] for step, m in run.evaluations.measures.items() if name in m}
    if not found:
        return UNKNOWN
    lower = any(word in name for word in _LOWER_IS_BETTER)
    step = (min if lower else max)(found, key=found.__getitem__)
    return f"{format_measure(name, found[step])} at step {step:,}"


def _last(run: Run, name: str) -> str:
    known = run.steps.column(name)
    return format_number(float(known[-1])) if len(known) and name in run.steps.columns else UNKNOWN


def _median(run: Run, name: str, format_: Callable[[float], str] = format_number) -> str:
    known = run.steps.column(name)
    known = known[np.isfinite(known)]
    return format_(float(np.median(known))) if len(known) else UNKNOWN


def _elapsed(run: Run) -> float:
    times = run.steps.column("time")
    times = times[np.isfinite(times)]
    return float(times[-1] - times[0]) if len(times) > 1 else 0.0


def _duration_or_unknown(seconds: float) -> str:
    return format_duration(seconds) if seconds > 0 else UNKNOWN
