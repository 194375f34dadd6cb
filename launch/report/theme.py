"""The style of the report's plots: SVG with the page's colors, for light and dark mode.

matplotlib draws with placeholder colors, which are replaced by CSS variables in the page.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.figure import Figure

INK, MUTED, GRID, PAGE = "#010101", "#020202", "#030303", "#010201"
_NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", PAGE: "page"}
NUM_COLORS = 8
RUN_COLORS = tuple(f"#04040{number}" for number in range(NUM_COLORS))
PART_COLORS = tuple(f"#05050{number}" for number in range(NUM_COLORS))
_NAMES |= {color: f"run{number}" for number, color in enumerate(RUN_COLORS)}
_NAMES |= {color: f"part{number}" for number, color in enumerate(PART_COLORS)}
DASHES = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1.5, 1.2)))

# (light, dark): at least 3:1 contrast with the page, and distinguishable by color-blind readers.
PALETTE = {
    "ink": ("#1f2933", "#e4e7eb"),
    "muted": ("#52606d", "#9aa5b1"),
    "grid": ("#dde2e7", "#3a434d"),
    "run0": ("#1565a8", "#62b0f4"),
    "run1": ("#b4460f", "#ff9a5c"),
    "run2": ("#00755c", "#3ecfa6"),
    "run3": ("#9c2f7f", "#ec86cf"),
    "run4": ("#6a51b8", "#b3a1f7"),
    "run5": ("#7d6400", "#dcbf45"),
    "run6": ("#b3202e", "#ff8088"),
    "run7": ("#4b5a68", "#b8c4cf"),
    "part0": ("#9fc5e8", "#2f5f8a"),
    "part1": ("#1565a8", "#62b0f4"),
    "part2": ("#f0b48a", "#8a4a22"),
    "part3": ("#b4460f", "#ff9a5c"),
    "part4": ("#a6d8c8", "#21705b"),
    "part5": ("#00755c", "#3ecfa6"),
    "part6": ("#dcb9d3", "#7a3a69"),
    "part7": ("#5b6770", "#aab4be"),
}
_SIZE = (4.7, 3.0)  # inches; phones show it at 80%


@contextmanager
def report_style() -> Iterator[None]:
    """matplotlib settings for the report, independent of the user's own settings."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": "kway",
                "text.parse_math": False,
                "font.size": 10.5,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.edgecolor": MUTED,
                "axes.labelcolor": INK,
                "axes.grid": True,
                "axes.axisbelow": True,
                "axes.formatter.useoffset": False,
                "axes.formatter.limits": (-4, 6),
                "grid.color": GRID,
                "grid.linewidth": 0.8,
                "text.color": INK,
                "xtick.color": MUTED,
                "ytick.color": MUTED,
                "xtick.labelcolor": INK,
                "ytick.labelcolor": INK,
                "lines.linewidth": 1.8,
            }
        )
        yield


def new_figure(height: float = _SIZE[1]) -> Figure:
    """An empty figure without a background, `height` inches high."""
    return Figure(figsize=(_SIZE[0], height), layout="constrained", facecolor="none")


def as_svg(figure: Figure, description: str) -> str:
    """The figure as an SVG element. `description` is escaped HTML text for screen readers."""
    text = io.StringIO()
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(text, format="svg", metadata=none, transparent=True)
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # Remove the IDs of groups, which repeat in every figure but must be unique on the page. Keep
    # the other IDs, which are hashes of the content and may be referenced.
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    svg = re.sub(r"#0[1-5]0[1-5]0\d", lambda found: f"var(--{_NAMES[found[0]]})", svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1)


def style_of(number: int) -> dict[str, Any]:
    """Color and dashes of the run with this number; the combination is unique for up to 26 runs."""
    turn = number // NUM_COLORS
    return {
        "color": RUN_COLORS[number % NUM_COLORS],
        "linestyle": DASHES[(number + turn) % len(DASHES)],
    }
