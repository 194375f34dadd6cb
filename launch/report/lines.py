"""One picture: curves of several runs over one axis, each ending in its run's letter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from launch.report.look import RUNS, new_figure, style_of

_MOST_POINTS = 300
_SMOOTH_OVER = 120  # points from which on a curve is drawn smooth, its points faintly behind it
_LETTER_GAP, _LETTER_WIDTH = 0.065, 0.06  # of the picture's height and width
_EVENTS_ROW = 0.045
_TICKS = [1, 2, 2.5, 5, 10]
_WIDE = 30  # times the median: from there on a linear scale shows one end of a curve alone

Mark = Literal["checkpoint", "restart", "refused", "other"]
MARKS: dict[Mark, str] = {"checkpoint": "^", "restart": "|", "refused": "x", "other": "d"}


@dataclass(frozen=True)
class Curve:
    """`y` [n] over `x` [n] of the run with this number and letter."""

    number: int
    letter: str
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Marked:
    """Something that happened to a run at these places of the x axis."""

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
    """The picture of `curves`, on a logarithmic scale with `log` where all is above zero.

    `if wide`: where some numbers are many times the others, too. `shares`: both axes are from 0
    to 1.
    """
    figure = new_figure()
    axes = figure.subplots()
    sound = [curve for curve in map(_sound, curves) if len(curve.x)]
    for curve in sound:
        _draw(axes, curve, smooth=smooth)
    _draw_marks(axes, marked)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=_TICKS))
    if _takes_logarithm(sound) and (log is True or (log and _is_wide(sound))):
        _make_logarithmic(axes)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=_TICKS))
        if from_zero:
            axes.set_ylim(bottom=0)
    if shares:
        axes.set(xlim=(0, 1), ylim=(-0.02, 1.02))
    _write_letters(axes, sound)
    return figure


def _sound(curve: Curve) -> Curve:
    """Without what is not finite, and where there are many points, means of neighbours."""
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
    """The mean over up to `width` neighbours, as many on either side; fewer at the ends."""
    half = width // 2
    sums = np.concatenate([[0.0], np.cumsum(y)])
    places = np.arange(len(y))
    reach = np.minimum(np.minimum(places, len(y) - 1 - places), half)
    means: np.ndarray = (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)
    return means


def _takes_logarithm(curves: Sequence[Curve]) -> bool:
    return bool(curves) and all((curve.y > 0).all() for curve in curves)


def _is_wide(curves: Sequence[Curve]) -> bool:
    values = np.concatenate([curve.y for curve in curves])
    return bool(values.max() > _WIDE * np.median(values))


def _make_logarithmic(axes: Axes) -> None:
    """Plain numbers at 1, 2, 5, 10: matplotlib's own labels are formulas."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _write_letters(axes: Axes, curves: Sequence[Curve]) -> None:
    """Each run's letter where its curve ends, moved apart where curves end side by side."""
    axes.autoscale_view()  # else it is put off, and the ends are not where they will be
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
            color=RUNS[curve.number % len(RUNS)],
            annotation_clip=False,
        )


def _apart(ends: np.ndarray) -> np.ndarray:
    """Heights for letters at `ends` [n, 2], in shares of the picture: no two on one another."""
    heights = np.zeros(len(ends))
    left = list(np.argsort(ends[:, 0])) if len(ends) else []
    while left:
        column = [place for place in left if ends[place, 0] < ends[left[0], 0] + _LETTER_WIDTH]
        left = left[len(column) :]
        column.sort(key=lambda place: ends[place, 1])
        wanted = np.array([ends[place, 1] for place in column])
        steps = _LETTER_GAP * np.arange(len(column))
        # Upwards only as far as it must be, and then all of them down again under the top.
        placed = np.maximum.accumulate(wanted - steps) + steps
        heights[column] = np.minimum(placed, 1 - steps[::-1])
    return heights


def _end(curve: Curve) -> float:
    return float((smoothed(curve.y) if len(curve.y) > _SMOOTH_OVER else curve.y)[-1])


def _draw_marks(axes: Axes, marked: Sequence[Marked]) -> None:
    """Along the bottom, a row a run; a restart is a line through the picture as well."""
    rows = sorted({event.number for event in marked})
    for event in marked:
        colour = RUNS[event.number % len(RUNS)]
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
            for place in event.x:
                axes.axvline(place, color=colour, linewidth=0.9, linestyle=(0, (2, 2)))
