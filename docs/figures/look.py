"""The style of the figures: colors, sizes and the file format.

The colors can be distinguished by color-blind readers, and no figure encodes information by color
alone.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

INK, GRAY, PALE = "#1f2933", "#7b8794", "#cbd2d9"
BLUE, AMBER, RED, TEAL = "#2680c2", "#edae49", "#d1495b", "#00798c"
RANKS = (BLUE, AMBER, RED)
FALSE, TRUE = "#9aa5b1", RED
OF_LOSS = {"ce": AMBER, "batch_ce": TEAL, "bce": BLUE}

_WIDTH, _DPI = 8.6, 160  # inches; 10-point text is still readable at half the size


@contextmanager
def look() -> Iterator[None]:
    """Apply the style of the figures, independent of the user's matplotlib settings."""
    matplotlib.use("Agg")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "font.size": 10.5,
                "axes.titlesize": 11.5,
                "axes.labelsize": 10.5,
                "axes.titlelocation": "left",
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.edgecolor": GRAY,
                "axes.labelcolor": INK,
                "axes.titlecolor": INK,
                "text.color": INK,
                "xtick.color": INK,
                "ytick.color": INK,
                "legend.frameon": False,
                "legend.fontsize": 10,
                "lines.linewidth": 2,
            }
        )
        yield


def new_figure(height: float) -> Figure:
    """Create an empty figure of the common width, `height` inches high."""
    return Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="white")


def bare(axes: Axes) -> None:
    """Hide the axes, and use the same scale for x and y."""
    axes.set_aspect("equal")
    axes.axis("off")


def save(figure: Figure, path: Path) -> None:
    """Write a PNG with at most 256 colors, which is a third of the size of a full-color PNG.

    The file does not contain dates or versions, so that it is reproducible.
    """
    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=_DPI, format="png")
    image = Image.open(pixels).convert("RGB")
    image.quantize(256, kmeans=2, dither=Image.Dither.NONE).save(path, optimize=True)
