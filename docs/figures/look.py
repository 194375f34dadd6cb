"""How the figures look: colours, sizes, and the file they are written to.

The colours stay apart for colour-blind readers; no figure tells by colour what nothing else says.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

INK, GREY, PALE = "#1f2933", "#7b8794", "#cbd2d9"
BLUE, AMBER, RED, TEAL = "#2680c2", "#edae49", "#d1495b", "#00798c"
RANKS = (BLUE, AMBER, RED)
FALSE, TRUE = "#9aa5b1", RED
OF_LOSS = {"ce": AMBER, "batch_ce": TEAL, "bce": BLUE}

_WIDTH, _DPI = 8.6, 160  # inches; text of 10 points is read at half the size, too


@contextmanager
def look() -> Iterator[None]:
    """The house's settings of matplotlib, whatever the reader's own are."""
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
                "axes.edgecolor": GREY,
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
    """An empty figure, `height` inches high and as wide as all the others."""
    return Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="white")


def bare(axes: Axes) -> None:
    """Leave nothing of the axes but what is drawn on them, a unit as long as it is high."""
    axes.set_aspect("equal")
    axes.axis("off")


def save(figure: Figure, path: Path) -> None:
    """Write a PNG of at most 256 colours, a third as large as with all of them.

    Without dates or versions in it, so that the same figure is the same file.
    """
    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=_DPI, format="png")
    image = Image.open(pixels).convert("RGB")
    image.quantize(256, kmeans=2, dither=Image.Dither.NONE).save(path, optimize=True)
