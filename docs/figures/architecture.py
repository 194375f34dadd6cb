"""The architecture: shards, training with a class-sharded classifier, and serving."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from docs.figures.diagram import arrow
from docs.figures.look import AMBER, BLUE, GRAY, INK, PALE, RED, TEAL, bare, new_figure

_DATA, _TRAINING, _SERVING = (0, 26), (34, 82), (90, 122)  # left and right edges
_TOP, _BOTTOM = 0.0, 50.0  # y downwards
_CLASSES = ("0 … K/3", "K/3 … 2K/3", "2K/3 … K")


def draw() -> Figure:
    figure = new_figure(3.95)
    ax = figure.subplots()
    for (left, right), title in (
        (_DATA, "data"),
        (_TRAINING, "trainer + heads"),
        (_SERVING, "serving"),
    ):
        _box(ax, left, _TOP, right - left, _BOTTOM, "", color="#f5f7fa", edge=PALE)
        ax.text((left + right) / 2, 3.6, title, ha="center", va="center", weight="bold")
    _draw_data(ax)
    _draw_training(ax)
    _draw_serving(ax)
    for start, end, text in (
        (_DATA[1], _TRAINING[0], "batches"),
        (_TRAINING[1], _SERVING[0], "bundle"),
    ):
        arrow(ax, (start + 0.6, 12), (end - 0.6, 12), color=INK)
        ax.text((start + end) / 2, 9.6, text, ha="center", va="center", fontsize=8.5)
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
        y = 8 + number * 10.6
        _box(ax, left, y, width, 8, text, color="white", edge=BLUE)
        if number:
            arrow(ax, (left + width / 2, y - 2.4), (left + width / 2, y - 0.2), color=BLUE)


def _draw_training(ax: Axes) -> None:
    left, width, gap = _TRAINING[0] + 2, 13.6, 1.6
    right = left + 3 * width + 2 * gap
    for rank, classes in enumerate(_CLASSES):
        x = left + rank * (width + gap)
        middle = x + width / 2
        _box(ax, x, 8, width, 8, f"rank {rank}\nbackbone", color="white", edge=TEAL)
        arrow(ax, (middle, 16.2), (middle, 18.4), color=TEAL)
        arrow(ax, (middle, 22.6), (middle, 24.8), color=AMBER)
        _box(ax, x, 25, width, 8, f"class rows\n{classes}", color="white", edge=AMBER)
        arrow(ax, (middle, 33.2), (middle, 35.4), color=AMBER)
    for y, text in (
        (18.6, "all-gather features"),
        (35.6, "all-gather per-row statistics, never logits"),
        (43.6, "exact loss → reduce-scatter feature gradients"),
    ):
        _box(ax, left, y, right - left, 3.9, text, color=PALE, edge=PALE)
    arrow(ax, ((left + right) / 2, 39.7), ((left + right) / 2, 43.4), color=INK)


def _draw_serving(ax: Axes) -> None:
    left, width = _SERVING[0] + 2, _SERVING[1] - _SERVING[0] - 4
    middle = left + width / 2
    _box(ax, left, 8, width, 8, "image or text\n→ backbone → features", color="white", edge=TEAL)
    arrow(ax, (middle, 16.2), (middle, 19.4), color=TEAL)
    for row in range(9):
        ax.add_patch(
            Rectangle(
                (left, 19.6 + row * 1.6),
                width,
                1.3,
                facecolor=RED if row == 5 else "white",
                edgecolor=RED if row == 5 else GRAY,
                lw=0.6,
            )
        )
    text = "1 of K rows is read"
    ax.text(middle, 36.1, text, ha="center", va="center", fontsize=8.5)
    arrow(ax, (middle, 37.9), (middle, 41.3), color=RED)
    _box(ax, left, 41.5, width, 6, "score ≥ class threshold?", color="white", edge=RED)


def _box(
    ax: Axes, x: float, y: float, width: float, height: float, text: str, *, color: str, edge: str
) -> None:
    """Draw a rounded box with its upper left corner at (x, y) and centered text."""
    style = "round,pad=0,rounding_size=0.8"
    ax.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor=edge)
    )
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5)
