"""The plots of the report as SVG in the text color of the page, for light and dark mode."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, PercentFormatter

from data.messages import printable
from launch.report.reading import Run

# At least 3:1 contrast with the page in light and dark mode.
COLORS = ["#2f7fd0", "#d1601a", "#0f8f6c", "#c2479c", "#7f66d6", "#997800", "#d43a46", "#6c7f90"]
_DASHES = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1.5, 1.2)))
_INK = "#010101"  # replaced by the text color of the page
_WIDTH, _HEIGHT, _BAR = 4.7, 3.0, 0.42  # inches
_MAX_POINTS = 300
_SMOOTH_POINTS = 40  # points of a smoothed curve, which is drawn over the faint raw curve
_WIDE_RANGE = 30  # a maximum above this multiple of the median would flatten the curve
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kway",
    "text.parse_math": False,
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "grid.color"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), _INK),
}


@dataclass(frozen=True)
class Curve:
    """`y` [n] against `x` [n] of a run."""

    run: Run
    x: np.ndarray
    y: np.ndarray

    def finite(self) -> "Curve":
        """Drop the points that are not finite."""
        known = np.isfinite(self.x) & np.isfinite(self.y)
        return Curve(self.run, self.x[known], self.y[known])

    def averaged(self, num_points: int) -> tuple[np.ndarray, np.ndarray]:
        """`x` and `y`, averaged over groups of neighbors if there are more than `num_points`."""
        starts = np.unique(np.linspace(0, len(self.x), num_points, endpoint=False).astype(int))
        counts = np.diff(starts, append=len(self.x))
        x, y = (np.add.reduceat(values, starts) / counts for values in (self.x, self.y))
        return x, y


def draw_curves(
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str = "",
    log: bool = False,
    smooth: bool = False,
    percent: bool = False,
    from_zero: bool = False,
) -> Figure:
    """Plot curves of finite points, at least one of them.

    log: use a logarithmic y axis if
    all values are positive and the largest ones would flatten the rest. percent: the `y` values are
    ratios.
    """
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        number = curve.run.number
        color = COLORS[number % len(COLORS)]
        dashes = _DASHES[(number + number // len(COLORS)) % len(_DASHES)]
        x, y = curve.averaged(_MAX_POINTS)
        if smooth and len(x) > 2 * _SMOOTH_POINTS:
            axes.plot(x, y, color=color, linewidth=0.8, alpha=0.3)
            x, y = curve.averaged(_SMOOTH_POINTS)
        marker = "o" if len(y) < 12 else ""
        axes.plot(x, y, c=color, ls=dashes, marker=marker, ms=4, label=curve.run.letter)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.xaxis.set_major_formatter(FuncFormatter(_compact))
    values = np.concatenate([curve.y for curve in curves])
    if log and (values > 0).all() and values.max() > _WIDE_RANGE * np.median(values):
        axes.set_yscale("log")
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    elif percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if from_zero:
        axes.set_ylim(0, 1.08 * values.max() or 1)
    if len(curves) > 1:
        axes.legend()
    return figure


def _compact(value: float, _position: int) -> str:
    """A tick as a number: `0.05`, `2.5k`, `1.5M`."""
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


def draw_shares(rows: dict[str, dict[str, float]], parts: Sequence[str]) -> Figure:
    """Draw one bar per row, divided into `parts`, whose shares sum to one."""
    height = 1 + _BAR * len(rows) + 0.25 * -(-len(parts) // 3)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    start = np.zeros(len(rows))
    for number, part in enumerate(parts):
        shares = np.array([row.get(part, 0.0) for row in rows.values()])
        color = COLORS[number % len(COLORS)]
        bars = axes.barh(list(rows), shares, left=start, color=color, height=0.7, label=part)
        wide = [f"{share:.0%}" if share >= 0.09 else "" for share in shares]
        axes.bar_label(bars, wide, label_type="center", color="white")
        start += shares
    axes.set(xlim=(0, 1), xlabel="share of the time")
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def as_svg(figure: Figure, description: str) -> Markup:
    """The figure as an SVG element with a description for screen readers."""
    text = io.StringIO()
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(text, format="svg", metadata=none, transparent=True)
    svg = text.getvalue()
    # Remove the IDs of groups, which repeat in every figure but must be unique on the page. Keep
    # the other IDs, which are hashes of the content and may be referenced.
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg[svg.index("<svg") :])
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2).replace(_INK, "currentColor")
    label = escape(printable(description))
    return Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1))
