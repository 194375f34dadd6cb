"""The engine: classes in blocks and on ranks, of which only a row's statistics leave.

A real batch of cross-entropy: every cell drawn is a number that the loss's own code computed.
"""

from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from docs.figures.diagram import arrow, cells
from docs.figures.look import GREY, INK, RANKS, bare, new_figure
from heads.losses import Block, CrossEntropy, Rows, Stats
from heads.weights import shard_range

_ROWS, _DIM, _CLASSES, _BLOCK = 4, 3, 24, 4
_LABELS = (1, 9, 14, 22)
_BLOCK_GAP, _RANK_GAP = 0.6, 1.8
# Upper edges of the bands, y downwards, in cells.
_WEIGHTS, _LOGITS, _STATISTICS, _OF_RANK, _TOTAL = 0.0, 4.2, 10.8, 17.0, 23.2
_FEATURES, _WORDS = -4.4, -11.0  # left edges


@dataclass(frozen=True)
class _Part:
    """A block's place in the figure and what it computes."""

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
    for x, colour in zip(middles, RANKS, strict=True):
        side = 0.0 if abs(x - middle) < 1 else (1.2 if x > middle else -1.2)
        arrow(ax, (x, _OF_RANK + 4.3), (middle + side, _TOTAL - 0.3), colour=colour)
    value = float(loss.value(total, Rows(_CLASSES, labels)))
    arrow(ax, (middle + 1.4, _TOTAL + 2), (middle + 4.2, _TOTAL + 2), colour=INK)
    ax.text(middle + 4.6, _TOTAL + 2, f"value: the loss, {value:.3f}", va="center", weight="bold")
    _draw_words(ax, right=parts[-1].x + _BLOCK)
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
        colour, middle = RANKS[part.rank], part.x + _BLOCK / 2
        cells(ax, part.weights.T, part.x, _WEIGHTS, edge=colour)
        cells(ax, part.logits, part.x, _LOGITS, edge=colour)
        for row, label in enumerate(_LABELS):
            if part.first <= label < part.first + _BLOCK:
                x = part.x + label - part.first + 0.5
                ax.plot(x, _LOGITS + row + 0.5, "o", color=INK, ms=4)
        arrow(ax, (middle, _LOGITS + 4.3), (middle, _STATISTICS - 0.3), colour=colour)
        _draw_statistics(ax, part.stats, middle, _STATISTICS, colour)


def _draw_ranks(ax: Axes, loss: CrossEntropy, parts: list[_Part]) -> list[float]:
    """Each rank's own total; returns where they stand."""
    middles = []
    for rank, colour in enumerate(RANKS):
        own = [part for part in parts if part.rank == rank]
        middle = (own[0].x + own[-1].x + _BLOCK) / 2
        ax.text(middle, _WEIGHTS - 0.5, f"rank {rank}", ha="center", weight="bold")
        _draw_statistics(ax, loss.merge([p.stats for p in own]), middle, _OF_RANK, colour)
        for part in own:
            side = -0.7 if part.x + _BLOCK / 2 < middle else 0.7
            start = part.x + _BLOCK / 2, _STATISTICS + 4.3
            arrow(ax, start, (middle + side, _OF_RANK - 0.3), colour=colour)
        middles.append(middle)
    return middles


def _draw_statistics(ax: Axes, stats: Stats, middle: float, y: float, colour: str) -> None:
    cells(ax, torch.stack(stats, dim=1), middle - 1, y, edge=colour)


def _draw_words(ax: Axes, right: float) -> None:
    head = "a head = class weights × a loss"
    ax.text(_WORDS, _WEIGHTS - 2, head, fontsize=11.5, weight="bold")
    for y, text in (
        (_WEIGHTS, "class weights"),
        (_LOGITS, "logits of a block:\nmade, reduced,\ndropped\n• the true ones"),
        (_STATISTICS, "statistics of ce,\nlogsumexp z and z_y:\nall that leaves"),
        (_OF_RANK, "merged over\na rank's blocks"),
        (_TOTAL, "merged over\nthe ranks"),
    ):
        ax.text(_WORDS, y + (1.5 if y == _WEIGHTS else 2), text, va="center", linespacing=1.25)
    arrow(ax, (right + 1, _TOTAL + 2), (right + 1, _LOGITS), colour=GREY)
    text = "backward: the gradient of the statistics\ngoes back up, logits are made again"
    middle = (_LOGITS + _TOTAL + 2) / 2
    ax.text(right + 1.6, middle, text, rotation=90, ha="left", va="center")
    ax.set(xlim=(_WORDS, right + 4), ylim=(_TOTAL + 4.2, _WEIGHTS - 3))
    bare(ax)
