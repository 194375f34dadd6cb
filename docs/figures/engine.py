"""The engine: blocks of classes on ranks, reduced to statistics of each row.

The figure shows a real batch: kway's cross-entropy computes the values of all cells.
"""

from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from docs.figures.diagram import arrow, cells
from docs.figures.look import GRAY, INK, RANKS, bare, new_figure
from heads.losses import Block, CrossEntropy, Rows, Stats
from heads.weights import shard_range

_ROWS, _DIM, _CLASSES, _BLOCK = 4, 3, 24, 4
_LABELS = (1, 9, 14, 22)
_BLOCK_GAP, _RANK_GAP = 0.6, 1.8
# Upper edges of the bands, y downwards, in cells.
_WEIGHTS, _LOGITS, _STATISTICS, _OF_RANK, _TOTAL = 0.0, 4.2, 10.8, 17.0, 23.2
_FEATURES, _LABEL_X = -4.4, -11.0  # left edges


@dataclass(frozen=True)
class _Part:
    """A block: its position in the figure and its tensors."""

    x: float
    rank: int
    first: int
    weights: Tensor
    logits: Tensor
    stats: Stats


def draw() -> Figure:
    figure = new_figure(6.1)
    ax = figure.subplots()
    loss, labels = CrossEntropy(), torch.tensor(_LABELS)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(_ROWS, _DIM, generator=generator)
    parts = _parts(loss, features, labels, torch.randn(_CLASSES, _DIM, generator=generator))
    _draw_blocks(ax, features, parts)
    middles = _draw_ranks(ax, loss, parts)
    total = loss.merge([part.stats for part in parts])
    middle = sum(middles) / len(middles)
    _draw_statistics(ax, total, middle, _TOTAL, INK)
    for x, color in zip(middles, RANKS, strict=True):
        side = 0.0 if abs(x - middle) < 1 else (1.2 if x > middle else -1.2)
        arrow(ax, (x, _OF_RANK + 4.3), (middle + side, _TOTAL - 0.3), color=color)
    value = float(loss.value(total, Rows(_CLASSES, labels)))
    arrow(ax, (middle + 1.4, _TOTAL + 2), (middle + 4.2, _TOTAL + 2), color=INK)
    ax.text(middle + 4.6, _TOTAL + 2, f"loss: {value:.3f}", va="center", weight="bold")
    _draw_labels(ax, right=parts[-1].x + _BLOCK)
    return figure


def _parts(loss: CrossEntropy, features: Tensor, labels: Tensor, weights: Tensor) -> list[_Part]:
    parts, x = [], 0.0
    for rank in range(len(RANKS)):
        start, stop = shard_range(_CLASSES, rank, len(RANKS))
        for first in range(start, stop, _BLOCK):
            class_ids = torch.arange(first, min(first + _BLOCK, stop))
            logits = features @ weights[class_ids].T
            stats = loss.statistics(logits, Block.of(class_ids, labels, labels - first, logits))
            parts.append(_Part(x, rank, first, weights[class_ids], logits, stats))
            x += _BLOCK + _BLOCK_GAP
        x += _RANK_GAP - _BLOCK_GAP
    return parts


def _draw_blocks(ax: Axes, features: Tensor, parts: list[_Part]) -> None:
    cells(ax, features, _FEATURES, _LOGITS)
    ax.text(_FEATURES + _DIM / 2, _LOGITS - 0.5, "features", ha="center")
    for part in parts:
        color, middle = RANKS[part.rank], part.x + _BLOCK / 2
        cells(ax, part.weights.T, part.x, _WEIGHTS, edge=color)
        cells(ax, part.logits, part.x, _LOGITS, edge=color)
        for row, label in enumerate(_LABELS):
            if part.first <= label < part.first + _BLOCK:
                x = part.x + label - part.first + 0.5
                ax.plot(x, _LOGITS + row + 0.5, "o", color=INK, ms=4)
        arrow(ax, (middle, _LOGITS + 4.3), (middle, _STATISTICS - 0.3), color=color)
        _draw_statistics(ax, part.stats, middle, _STATISTICS, color)


def _draw_ranks(ax: Axes, loss: CrossEntropy, parts: list[_Part]) -> list[float]:
    """Draw the merged statistics of each rank; return their x coordinates."""
    middles = []
    for rank, color in enumerate(RANKS):
        own = [part for part in parts if part.rank == rank]
        middle = (own[0].x + own[-1].x + _BLOCK) / 2
        ax.text(middle, _WEIGHTS - 0.5, f"rank {rank}", ha="center", weight="bold")
        _draw_statistics(ax, loss.merge([p.stats for p in own]), middle, _OF_RANK, color)
        for part in own:
            side = -0.7 if part.x + _BLOCK / 2 < middle else 0.7
            start = part.x + _BLOCK / 2, _STATISTICS + 4.3
            arrow(ax, start, (middle + side, _OF_RANK - 0.3), color=color)
        middles.append(middle)
    return middles


def _draw_statistics(ax: Axes, stats: Stats, middle: float, y: float, color: str) -> None:
    cells(ax, torch.stack(stats, dim=1), middle - 1, y, edge=color)


def _draw_labels(ax: Axes, right: float) -> None:
    head = "head = class weights × loss"
    ax.text(_LABEL_X, _WEIGHTS - 2, head, fontsize=11.5, weight="bold")
    for y, text in (
        (_WEIGHTS, "class weights"),
        (_LOGITS, "logits of a block:\ncomputed,\nreduced, freed\n• true logits"),
        (_STATISTICS, "statistics of ce,\nlogsumexp(z) and z_y:\nonly these are kept"),
        (_OF_RANK, "merged over the\nblocks of a rank"),
        (_TOTAL, "merged over\nthe ranks"),
    ):
        ax.text(_LABEL_X, y + (1.5 if y == _WEIGHTS else 2), text, va="center", linespacing=1.25)
    arrow(ax, (right + 1, _TOTAL + 2), (right + 1, _LOGITS), color=GRAY)
    text = "backward: from the gradients of the\nstatistics, with recomputed logits"
    middle = (_LOGITS + _TOTAL + 2) / 2
    ax.text(right + 1.6, middle, text, rotation=90, ha="left", va="center")
    ax.set(xlim=(_LABEL_X, right + 4), ylim=(_TOTAL + 4.2, _WEIGHTS - 3))
    bare(ax)
