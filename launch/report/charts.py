"""Charts of the report: curves of several runs, stacked shares and grouped bars."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from launch.report.theme import INK, PAGE, PART_COLORS, RUN_COLORS, new_figure, style_of

_MOST_POINTS = 300
_SMOOTH_OVER = 120  # curves with more points are drawn smoothed, on top of the faint raw curve
_LETTER_GAP, _LETTER_WIDTH = 0.065, 0.06  # as fractions of the plot's height and width
_EVENTS_ROW = 0.045
_TICKS = [1, 2, 2.5, 5, 10]
_WIDE = 30  # a maximum above this many medians would flatten the rest of the curve

Mark = Literal["checkpoint", "restart", "refused", "other"]
MARKS: dict[Mark, str] = {"checkpoint": "^", "restart": "|", "refused": "x", "other": "d"}
_ROW = 0.42  # inches
_CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}
_FRAME = 0.9
_BAR, _BETWEEN = 0.16, 0.14
_ROOM = 1.06  # margin for the letters at the ends of bars
_LEAST_LABELLED = 0.07  # as a fraction of the bar: smaller parts are too narrow for a number


@dataclass(frozen=True)
class Curve:
    """`y` [n] over `x` [n], for the run with this number and letter."""

    number: int
    letter: str
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Marked:
    """Events of one kind in a run, at these positions on the x axis."""

    number: int
    mark: Mark
    x: Sequence[float]


def draw_curves(
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    marked: Sequence[Marked] = (),
    log: bool | Literal["if wide"] = False,
    smooth: bool = True,
    from_zero: bool = False,
    shares: bool = False,
) -> Figure:
    """Plot the curves.

    log: use a logarithmic y axis if all values are positive; "if wide": only if the maximum is also
    far above the median. shares: both axes range from 0 to 1.
    """
    figure = new_figure()
    axes = figure.subplots()
    finite = [curve for curve in map(_finite, curves) if len(curve.x)]
    for curve in finite:
        _draw(axes, curve, smooth=smooth)
    _draw_marks(axes, marked)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=_TICKS))
    if _takes_logarithm(finite) and (log is True or (log and _is_wide(finite))):
        _make_logarithmic(axes)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=_TICKS))
        if from_zero:
            axes.set_ylim(bottom=0)
    if shares:
        axes.set(xlim=(0, 1), ylim=(-0.02, 1.02))
    _write_letters(axes, finite)
    return figure


def _finite(curve: Curve) -> Curve:
    """Drop non-finite points. If there are too many points, average groups of neighbors."""
    kept = np.isfinite(curve.x) & np.isfinite(curve.y)
    x, y = curve.x[kept], curve.y[kept]
    if len(x) > _MOST_POINTS:
        starts = np.linspace(0, len(x), _MOST_POINTS, endpoint=False).astype(int)
        counts = np.diff(starts, append=len(x))
        x, y = (np.add.reduceat(values, starts) / counts for values in (x, y))
    return Curve(curve.number, curve.letter, x, y)


def _draw(axes: Axes, curve: Curve, *, smooth: bool) -> None:
    style = style_of(curve.number)
    if smooth and len(curve.x) > _SMOOTH_OVER:
        axes.plot(curve.x, curve.y, color=style["color"], linewidth=0.8, alpha=0.3)
        axes.plot(curve.x, smoothed(curve.y), **style)
    else:
        marker = "o" if len(curve.x) < 12 else None
        axes.plot(curve.x, curve.y, marker=marker, markersize=4, **style)


def smoothed(y: np.ndarray, width: int = 15) -> np.ndarray:
    """Centered moving average over at most `width` values; the window is narrower near the ends."""
    half = width // 2
    sums = np.concatenate([[0.0], np.cumsum(y)])
    positions = np.arange(len(y))
    reach = np.minimum(np.minimum(positions, len(y) - 1 - positions), half)
    means: np.ndarray = (sums[positions + reach + 1] - sums[positions - reach]) / (2 * reach + 1)
    return means


def _takes_logarithm(curves: Sequence[Curve]) -> bool:
    return bool(curves) and all((curve.y > 0).all() for curve in curves)


def _is_wide(curves: Sequence[Curve]) -> bool:
    values = np.concatenate([curve.y for curve in curves])
    return bool(values.max() > _WIDE * np.median(values))


def _make_logarithmic(axes: Axes) -> None:
    """Label the axis with plain numbers (1, 2, 5, 10); matplotlib's default labels are formulas."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _write_letters(axes: Axes, curves: Sequence[Curve]) -> None:
    """Write each run's letter at the end of its curve, moved vertically to avoid overlaps."""
    axes.autoscale_view()  # otherwise deferred, and the transform below would be out of date
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [to_axes.transform((curve.x[-1], _end(curve))) for curve in curves]
    for curve, height in zip(curves, _apart(np.array(ends)), strict=True):
        axes.annotate(
            curve.letter,
            (float(curve.x[-1]), float(height)),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            weight="bold",
            color=RUN_COLORS[curve.number % len(RUN_COLORS)],
            annotation_clip=False,
        )


def _apart(ends: np.ndarray) -> np.ndarray:
    """Non-overlapping heights for letters at `ends` [n, 2], as fractions of the plot's height."""
    heights = np.zeros(len(ends))
    left = list(np.argsort(ends[:, 0])) if len(ends) else []
    while left:
        column = [index for index in left if ends[index, 0] < ends[left[0], 0] + _LETTER_WIDTH]
        left = left[len(column) :]
        column.sort(key=lambda index: ends[index, 1])
        wanted = np.array([ends[index, 1] for index in column])
        steps = _LETTER_GAP * np.arange(len(column))
        # Move letters up only as far as needed, then move them down where they exceed the top.
        placed = np.maximum.accumulate(wanted - steps) + steps
        heights[column] = np.minimum(placed, 1 - steps[::-1])
    return heights


def _end(curve: Curve) -> float:
    return float((smoothed(curve.y) if len(curve.y) > _SMOOTH_OVER else curve.y)[-1])


def _draw_marks(axes: Axes, marked: Sequence[Marked]) -> None:
    """Draw events along the bottom, one row per run. A restart also gets a vertical line."""
    rows = sorted({event.number for event in marked})
    for event in marked:
        colour = RUN_COLORS[event.number % len(RUN_COLORS)]
        height = 0.03 + _EVENTS_ROW * rows.index(event.number)
        axes.plot(
            event.x,
            np.full(len(event.x), height),
            transform=axes.get_xaxis_transform(),
            linestyle="none",
            marker=MARKS[event.mark],
            markersize=5,
            color=colour,
            clip_on=False,
        )
        if event.mark == "restart":
            for x in event.x:
                axes.axvline(x, color=colour, linewidth=0.9, linestyle=(0, (2, 2)))


def draw_shares(rows: Sequence[tuple[str, dict[str, float]]], parts: Sequence[str]) -> Figure:
    """Draw one bar per row, labeled with its letter and divided into `parts` by shares that sum to
    one. The number of each part, counted from 1, is inside the bar."""
    figure = new_figure(_FRAME + _ROW * len(rows))
    axes = figure.subplots()
    for index, (_, shares) in enumerate(rows):
        start = 0.0
        for number, part in enumerate(parts):
            share = shares.get(part, 0.0)
            axes.barh(
                index, share, left=start, color=PART_COLORS[number % len(PART_COLORS)], height=0.7
            )
            if share >= _LEAST_LABELLED:
                colour = PAGE if number % 2 else INK  # every second part has a dark color
                axes.text(start + share / 2, index, str(number + 1), color=colour, **_CENTRED)
            start += share
    axes.set_yticks(range(len(rows)), [letter for letter, _ in rows])
    axes.set(xlim=(0, 1), xlabel="share of the time")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure


def draw_values(rows: Sequence[Sequence[tuple[int, str, float]]]) -> Figure:
    """Draw a group of bars per row, with rows numbered from 1. A bar is (number, letter, value)."""
    thickness = _BAR * max(len(row) for row in rows) + _BETWEEN
    figure = new_figure(_FRAME + thickness * len(rows))
    axes = figure.subplots()
    for index, row in enumerate(rows):
        for offset, (number, letter, value) in enumerate(row):
            height = index + (offset - (len(row) - 1) / 2) * _BAR / thickness
            colour = RUN_COLORS[number % len(RUN_COLORS)]
            axes.barh(height, value, color=colour, height=0.85 * _BAR / thickness)
            axes.annotate(
                letter,
                (value, height),
                xytext=(3 if value >= 0 else -3, 0),
                textcoords="offset points",
                ha="left" if value >= 0 else "right",
                va="center_baseline",
                size="small",
                color=colour,
                weight="bold",
            )
    axes.set_yticks(range(len(rows)), [str(index + 1) for index in range(len(rows))])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    values = [value for row in rows for _, _, value in row]
    axes.set_xlim(min([0.0, *values]) * _ROOM, max([1.0, *values]) * _ROOM)
    return figure
