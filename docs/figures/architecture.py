"""The architecture: shards, training with a class-sharded classifier, and serving."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from docs.figures.diagram import arrow
from docs.figures.look import AMBER, BLUE, GRAY, INK, PALE, RED, TEAL, bare, new_figure

_DATA, _TRAINING, _SERVING = (0, 26), (34, 82), (90, 122)  # left and right edges
_TOP, _BOTTOM = 0.0, 33.0  # y downwards
_FIRST, _HEIGHT = 4.6, 5.2  # of the boxes
_CLASSES = ("0 … K/3", "K/3 … 2K/3", "2K/3 … K")


def draw() -> Figure:
    figure = new_figure(2.55)
    ax = figure.subplots()
    for (left, right), title in (
        (_DATA, "data"),
        (_TRAINING, "trainer + heads"),
        (_SERVING, "serving"),
    ):
        _box(ax, left, _TOP, right - left, _BOTTOM, "", color="#f5f7fa", edge=PALE)
        ax.text((left + right) / 2, 2.4, title, ha="center", va="center", weight="bold")
    _draw_data(ax)
    _draw_training(ax)
    _draw_serving(ax)
    for start, end, text in (
        (_DATA[1], _TRAINING[0], "batches"),
        (_TRAINING[1], _SERVING[0], "bundle"),
    ):
        arrow(ax, (start + 0.6, 7.2), (end - 0.6, 7.2), color=INK)
        ax.text((start + end) / 2, 5.2, text, ha="center", va="center", fontsize=8.5)
    ax.set(xlim=(-0.5, _SERVING[1] + 0.5), ylim=(_BOTTOM + 0.5, _TOP - 0.5))
    bare(ax)
    return figure


def _draw_data(ax: Axes) -> None:
    left, width = _DATA[0] + 2, _DATA[1] - _DATA[0] - 4
    texts = (
        "images, texts",
        "webdataset shards\n+ offset index",
        "order from\n(seed, epoch)",
        "same global batches\nat every world size",
    )
    for number, text in enumerate(texts):
        y = _FIRST + number * 7.1
        _box(ax, left, y, width, _HEIGHT, text, color="white", edge=BLUE)
        if number:
            arrow(ax, (left + width / 2, y - 1.9), (left + width / 2, y - 0.1), color=BLUE)


def _draw_training(ax: Axes) -> None:
    left, width, gap = _TRAINING[0] + 2, 13.6, 1.6
    right = left + 3 * width + 2 * gap
    for rank, classes in enumerate(_CLASSES):
        x = left + rank * (width + gap)
        middle = x + width / 2
        _box(ax, x, _FIRST, width, _HEIGHT, f"rank {rank}\nbackbone", color="white", edge=TEAL)
        arrow(ax, (middle, 9.8), (middle, 11.5), color=TEAL)
        arrow(ax, (middle, 14.4), (middle, 16.1), color=AMBER)
        _box(ax, x, 16.2, width, _HEIGHT, f"class rows\n{classes}", color="white", edge=AMBER)
        arrow(ax, (middle, 21.4), (middle, 23.1), color=AMBER)
    for y, text in (
        (11.6, "all-gather features"),
        (23.2, "all-gather per-row statistics, never logits"),
        (28.3, "exact loss → reduce-scatter feature gradients"),
    ):
        _box(ax, left, y, right - left, 2.8, text, color=PALE, edge=PALE)
    arrow(ax, ((left + right) / 2, 26.1), ((left + right) / 2, 28.2), color=INK)


def _draw_serving(ax: Axes) -> None:
    left, width = _SERVING[0] + 2, _SERVING[1] - _SERVING[0] - 4
    middle = left + width / 2
    _box(
        ax,
        left,
        _FIRST,
        width,
        _HEIGHT,
        "image or text\n→ backbone → features",
        color="white",
        edge=TEAL,
    )
    arrow(ax, (middle, 9.8), (middle, 11.6), color=TEAL)
    for row in range(7):
        ax.add_patch(
            Rectangle(
                (left, 11.8 + row * 1.35),
                width,
                1.05,
                facecolor=RED if row == 4 else "white",
                edgecolor=RED if row == 4 else GRAY,
                lw=0.6,
            )
        )
    text = "1 of K rows is read"
    ax.text(middle, 22.8, text, ha="center", va="center", fontsize=8.5)
    arrow(ax, (middle, 24.2), (middle, 26.3), color=RED)
    _box(ax, left, 26.5, width, 4.6, "score ≥ class threshold?", color="white", edge=RED)


def _box(
    ax: Axes, x: float, y: float, width: float, height: float, text: str, *, color: str, edge: str
) -> None:
    """Draw a rounded box with its upper left corner at (x, y) and centered text."""
    style = "round,pad=0,rounding_size=0.8"
    ax.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor=edge)
    )
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5)
