"""What diagrams are made of: matrices as cells coloured by their values, and arrows."""

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import Tensor

from docs.figures.look import GREY

_VALUES = colormaps["PuOr_r"]


def cells(
    ax: Axes, values: Tensor, x: float, y: float, *, edge: str = GREY, size: float = 1.0
) -> None:
    """Draw a matrix [R, C] with its upper left corner at (x, y), y downwards; each cell `size`.

    Colours run from -4 to 4.
    """
    rows, columns = values.shape
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            colour = _VALUES(min(max(value / 8 + 0.5, 0.0), 1.0))
            corner = x + j * size, y + i * size
            ax.add_patch(Rectangle(corner, size, size, facecolor=colour, edgecolor="white", lw=0.6))
    width, height = columns * size, rows * size
    ax.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=edge, lw=1.6))


def arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    *,
    colour: str = GREY,
) -> None:
    """An arrow from `start` to `end`."""
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=11,
            color=colour,
            lw=1.4,
            shrinkA=0,
            shrinkB=0,
        )
    )
