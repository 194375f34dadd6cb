"""Elements of diagrams: matrices as cells colored by value, and arrows."""

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import Tensor

from docs.figures.look import GRAY

_VALUES = colormaps["PuOr_r"]


def cells(
    ax: Axes, values: Tensor, x: float, y: float, *, edge: str = GRAY, size: float = 1.0
) -> None:
    """Draw a matrix [R, C] with its upper left corner at (x, y) and cells of side `size`.

    y increases downwards. The color scale is from -4 to 4.
    """
    rows, columns = values.shape
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            color = _VALUES(min(max(value / 8 + 0.5, 0.0), 1.0))
            corner = x + j * size, y + i * size
            ax.add_patch(Rectangle(corner, size, size, facecolor=color, edgecolor="white", lw=0.6))
    width, height = columns * size, rows * size
    ax.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=edge, lw=1.6))


def arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    *,
    color: str = GRAY,
) -> None:
    """Draw an arrow from `start` to `end`."""
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=11,
            color=color,
            lw=1.4,
            shrinkA=0,
            shrinkB=0,
        )
    )
