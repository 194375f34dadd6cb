"""Pictures of shares and of single numbers: a bar or a row of points each."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from launch.report.look import INK, PAGE, PARTS, RUNS, new_figure

_ROW = 0.42  # inches
_CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}
_FRAME = 0.9
_BAR, _BETWEEN = 0.16, 0.14
_ROOM = 1.06  # for the letters at the ends of bars
_LEAST_LABELLED = 0.07  # of a bar: below that a number does not fit into its part


def draw_shares(rows: Sequence[tuple[str, dict[str, float]]], parts: Sequence[str]) -> Figure:
    """A bar a row, divided into `parts` by their shares, which add up to one; its letter before
    it, the parts' numbers, counted from 1, inside."""
    figure = new_figure(_FRAME + _ROW * len(rows))
    axes = figure.subplots()
    for place, (_, shares) in enumerate(rows):
        start = 0.0
        for number, part in enumerate(parts):
            share = shares.get(part, 0.0)
            axes.barh(place, share, left=start, color=PARTS[number % len(PARTS)], height=0.7)
            if share >= _LEAST_LABELLED:
                colour = PAGE if number % 2 else INK  # every other part is a strong one
                axes.text(start + share / 2, place, str(number + 1), color=colour, **_CENTRED)
            start += share
    axes.set_yticks(range(len(rows)), [letter for letter, _ in rows])
    axes.set(xlim=(0, 1), xlabel="share of the time")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure


def draw_values(rows: Sequence[Sequence[tuple[int, str, float]]]) -> Figure:
    """A group of bars a row: (number, letter, value) of runs; rows are numbered from 1."""
    thickness = _BAR * max(len(row) for row in rows) + _BETWEEN
    figure = new_figure(_FRAME + thickness * len(rows))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        for offset, (number, letter, value) in enumerate(row):
            height = place + (offset - (len(row) - 1) / 2) * _BAR / thickness
            colour = RUNS[number % len(RUNS)]
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
    axes.set_yticks(range(len(rows)), [str(place + 1) for place in range(len(rows))])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    values = [value for row in rows for _, _, value in row]
    axes.set_xlim(min([0.0, *values]) * _ROOM, max([1.0, *values]) * _ROOM)
    return figure
