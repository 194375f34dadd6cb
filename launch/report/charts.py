"""Charts of the report: curves of several runs, stacked shares and grouped bars."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from launch.report.theme import INK, PAGE, PART_COLORS, RUN_COLORS, new_figure, style_of

_MAX_POINTS = 300
_SMOOTH_OVER = 120  # curves with more points are smoothed and drawn over the faint raw curve
_LETTER_GAP, _LETTER_WIDTH = 0.065, 0.06  # as fractions of the plot's height and width
_EVENTS_ROW = 0.045
_TICKS = [1, 2, 2.5, 5, 10]
_WIDE_RANGE = 30  # a maximum above this multiple of the median would flatten the curve
_MAX_LOG_DECADES = 3  # with more decades, only powers of ten are labeled

Mark = Literal["checkpoint", "restart", "damaged", "other"]
MARKS: dict[Mark, str] = {"checkpoint": "^", "restart": "|", "damaged": "x", "other": "d"}
# Sizes of bars, in inches.
_ROW, _FRAME = 0.42, 0.9
_BAR, _BAR_GAP = 0.2, 0.16
_CENTERED: dict[str, Any] = {"ha": "center", "va": "center"}
_LABEL_CHARACTERS = 16  # longer bar labels are wrapped
_MIN_LABELED_SHARE = 0.09  # narrower parts of a bar are not labeled


@dataclass(frozen=True)
class Curve:
    """`y` [n] against `x` [n], for the run with this number and letter."""

    number: int
    letter: str
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Marked:
    """Events of one kind in a run, and their positions on the x axis."""

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
    percent: bool = False,
    shares: bool = False,
) -> Figure:
    """Plot the curves.

    log: use a logarithmic y axis if all values are positive; "if wide": only if the maximum is also
    far above the median. percent: the `y` values are ratios. shares: the `x` and `y` values are
    ratios from 0 to 1.
    """
    figure = new_figure()
    axes = figure.subplots()
    finite = [curve for curve in map(_finite, curves) if len(curve.x)]
    for curve in finite:
        _draw(axes, curve, smooth=smooth)
    _draw_marks(axes, marked)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=_TICKS))
    _format_ticks(axes.xaxis, in_percent if shares else plain)
    if _is_positive(finite) and (log is True or (log and _has_wide_range(finite))):
        _make_logarithmic(axes)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=_TICKS))
        _format_ticks(axes.yaxis, in_percent if percent or shares else plain)
        if from_zero:
            axes.set_ylim(0, 1.08 * max((curve.y.max() for curve in finite), default=0) or None)
    if shares:
        axes.set(xlim=(0, 1), ylim=(-0.02, 1.02))
    _write_letters(axes, finite)
    return figure


def _finite(curve: Curve) -> Curve:
    """Drop non-finite points. If there are too many points, average groups of neighbors."""
    finite = np.isfinite(curve.x) & np.isfinite(curve.y)
    x, y = curve.x[finite], curve.y[finite]
    if len(x) > _MAX_POINTS:
        starts = np.linspace(0, len(x), _MAX_POINTS, endpoint=False).astype(int)
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


def _is_positive(curves: Sequence[Curve]) -> bool:
    return bool(curves) and all((curve.y > 0).all() for curve in curves)


def _has_wide_range(curves: Sequence[Curve]) -> bool:
    values = np.concatenate([curve.y for curve in curves])
    return bool(values.max() > _WIDE_RANGE * np.median(values))


def _make_logarithmic(axes: Axes) -> None:
    """Label the axis with plain numbers (1, 2, 5, 10); matplotlib's default is powers of ten."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    subs = (1.0, 2.0, 5.0) if high < low * 10**_MAX_LOG_DECADES else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    _format_ticks(axes.yaxis, plain)
    axes.yaxis.set_minor_locator(NullLocator())


def _format_ticks(axis: Axis, text_of: Callable[[float], str]) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: text_of(value)))


def plain(value: float) -> str:
    """A tick as a number: `0.05`, `2,500`, `1.5M`."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.6g}M"
    value += 0.0  # -0.0 becomes 0.0
    return f"{value:,.10g}" if abs(value) >= 1000 else f"{value:.6g}"


def in_percent(ratio: float) -> str:
    """A tick as a percentage: `2.5%`."""
    return f"{100 * ratio:.6g}%"


def _write_letters(axes: Axes, curves: Sequence[Curve]) -> None:
    """Write each run's letter at the end of its curve, shifted vertically to avoid overlaps."""
    axes.autoscale_view()  # otherwise deferred, and the transform below would be out of date
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [to_axes.transform((curve.x[-1], _end(curve))) for curve in curves]
    for curve, height in zip(curves, _spread(np.array(ends)), strict=True):
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


def _spread(ends: np.ndarray) -> np.ndarray:
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
        color = RUN_COLORS[event.number % len(RUN_COLORS)]
        height = 0.03 + _EVENTS_ROW * rows.index(event.number)
        axes.plot(
            event.x,
            np.full(len(event.x), height),
            transform=axes.get_xaxis_transform(),
            linestyle="none",
            marker=MARKS[event.mark],
            markersize=5,
            color=color,
            clip_on=False,
        )
        if event.mark == "restart":
            for x in event.x:
                axes.axvline(x, color=color, linewidth=0.9, linestyle=(0, (2, 2)))


def draw_shares(rows: Sequence[tuple[str, dict[str, float]]], parts: Sequence[str]) -> Figure:
    """Draw one bar per row, labeled with its letter.

    A bar is divided into `parts`, whose shares sum to one. Part i has color `PART_COLORS[i]`. Wide
    parts are labeled with their percentage.
    """
    figure = new_figure(_FRAME + _ROW * len(rows))
    axes = figure.subplots()
    for index, (_, shares) in enumerate(rows):
        start = 0.0
        for number, part in enumerate(parts):
            share = shares.get(part, 0.0)
            axes.barh(
                index, share, left=start, color=PART_COLORS[number % len(PART_COLORS)], height=0.7
            )
            if share >= _MIN_LABELED_SHARE:
                color = PAGE if number % 2 else INK  # every second part has a dark color
                axes.text(start + share / 2, index, f"{share:.0%}", color=color, **_CENTERED)
            start += share
    axes.set_yticks(range(len(rows)), [letter for letter, _ in rows], weight="bold")
    axes.set(xlim=(0, 1), xlabel="share of the time")
    _format_ticks(axes.xaxis, in_percent)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure


@dataclass(frozen=True)
class Bar:
    """The value of the run with this number and letter."""

    number: int
    letter: str
    value: float


def draw_ratios(groups: Sequence[tuple[str, Sequence[Bar]]]) -> Figure:
    """Draw a labeled group of bars per metric. The end of each bar shows its run's letter and its
    value in percent."""
    thickness = _BAR * max(len(bars) for _, bars in groups) + _BAR_GAP
    figure = new_figure(_FRAME + thickness * len(groups))
    axes = figure.subplots()
    for index, (_, bars) in enumerate(groups):
        for offset, bar in enumerate(bars):
            height = index + (offset - (len(bars) - 1) / 2) * _BAR / thickness
            _draw_bar(axes, bar, height, 0.85 * _BAR / thickness)
    axes.set_yticks(range(len(groups)), [fill(name, _LABEL_CHARACTERS) for name, _ in groups])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    values = [bar.value for _, bars in groups for bar in bars]
    axes.set_xlim(min([0.0, *values]), max([1.0, *values]))
    _format_ticks(axes.xaxis, in_percent)
    return figure


def _draw_bar(axes: Axes, bar: Bar, height: float, thickness: float) -> None:
    color = RUN_COLORS[bar.number % len(RUN_COLORS)]
    axes.barh(height, bar.value, color=color, height=thickness)
    axes.annotate(
        f"{bar.letter} {bar.value:.1%}",
        (max(bar.value, 0.0), height),
        xytext=(4, 0),
        textcoords="offset points",
        va="center_baseline",
        size="small",
        color=color,
        weight="bold",
        annotation_clip=False,
    )
