"""Row types: the memory of a number of a class row, and a weight that receives small updates."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from docs.figures.look import AMBER, BLUE, GRAY, INK, PALE, RED, new_figure
from heads.rows.hashing import random_bits
from heads.rows.rounding import rounded

# Bytes of the row, its gradient between the backward pass and the update, and the moments.
_MEMORY = {
    "fp32, adamw": (4, 4, 8),
    "fp32, sgd with momentum": (4, 4, 4),
    "bf16, adamw": (2, 2, 4),
    "bf16, sgd with momentum": (2, 2, 2),
    "fp32, fused SGD": (4, 0, 0),
    "bf16, fused SGD": (2, 0, 0),
    "fp8, fused SGD": (1, 0, 0),
}
_PARTS = {"row": BLUE, "gradient": AMBER, "moments": PALE}
_STEPS, _UPDATE, _DRAWS = 60, 0.0005, 2_000


def draw() -> Figure:
    figure = new_figure(3.6)
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    _draw_memory(left)
    _draw_updates(right)
    return figure


def _draw_memory(ax: Axes) -> None:
    for index, (part, color) in enumerate(_PARTS.items()):
        sizes = [each[index] for each in _MEMORY.values()]
        starts = [sum(each[:index]) for each in _MEMORY.values()]
        ax.barh(list(_MEMORY), sizes, left=starts, color=color, edgecolor="white", label=part)
    for place, sizes in enumerate(_MEMORY.values()):
        total = sum(sizes)
        ax.annotate(f"{total}", (total, place), (4, 0), textcoords="offset points", va="center")
    ax.invert_yaxis()
    ax.set(title="Bytes per number of a class row", xlim=(0, 17.5), xticks=range(0, 17, 4))
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="lower right")


def _draw_updates(ax: Axes) -> None:
    """Draw a weight that starts at 1, of which each step adds 0.0005: the distance between adjacent
    bf16 numbers is 16 times as large."""
    steps = range(_STEPS + 1)
    ax.plot(steps, [1 + _UPDATE * step for step in steps], color=INK, label="float32")
    random = _trajectories(at_random=True)
    ax.plot(steps, random.mean(1), "--", color=BLUE, label=f"mean of {_DRAWS:,} random ones")
    ax.step(steps, random[:, 0], where="post", color=AMBER, lw=1.3, label="bf16, rounded at random")
    nearest = _trajectories(at_random=False)[:, 0]
    ax.plot(steps, nearest, ":", color=RED, label="bf16, rounded to nearest")
    ax.set(title="A weight with small updates", xlabel="step", ylim=(0.996, 1.045))
    ax.grid(axis="y", color=GRAY, alpha=0.25)
    ax.legend(loc="upper left")


def _trajectories(*, at_random: bool) -> Tensor:
    """Return the bf16 weight after each step [steps + 1, draws]."""
    weights = [torch.ones(_DRAWS, 1)]
    for step in range(_STEPS):
        bits = random_bits(torch.arange(_DRAWS), 1, 16, seed=step) if at_random else None
        weights.append(rounded(weights[-1] + _UPDATE, torch.bfloat16, bits).float())
    return torch.cat(weights, dim=1).T
