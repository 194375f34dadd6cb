"""The loss of the global batch as a function of one rank's statistics.

After one exchange, every rank has the statistics of all ranks. Each rank treats the statistics of
the others as constants and differentiates with respect to its own, without a further collective.
For example, the cross-entropy of a row over two ranks is log(e^a + e^b) - z_y, where a and b are
the logsumexp of the logits on rank 0 and on rank 1. Rank 0 computes the derivative with respect to
a, e^a / (e^a + e^b), and rank 1 the derivative with respect to b. Both compute the same loss.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_gather_equal, all_gather_rows, group_rank
from heads.losses import Loss, Rows, Stats


class BlockStatistics:
    """The statistics of a rank's blocks: one tensor per statistic, with one row per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._columns: Stats = ()

    def put(self, index: int, stats: Stats) -> None:
        if not self._columns:
            self._columns = tuple(stat.new_empty((self.num_blocks, *stat.shape)) for stat in stats)
        for column, stat in zip(self._columns, stats, strict=True):
            column[index] = stat.detach()

    def __iter__(self) -> Iterator[Stats]:
        return zip(*self._columns, strict=True) if self._columns else iter(())


@dataclass(frozen=True)
class GlobalLoss:
    """The loss as a function of this rank's statistics; the other ranks' are held constant.

    The ranks of a class group have different classes and the same rows, so their statistics are
    merged. Along `data`, the class groups have different rows, so their totals are concatenated.
    `counts` selects the rows that are not ignored (None: all).
    """

    loss: Loss
    class_stats: list[Stats]
    class_rank: int
    data_totals: list[Stats]
    data_rank: int
    counts: Tensor | None
    rows: Rows

    @classmethod
    def gather(
        cls,
        loss: Loss,
        mine: Stats,
        rows: Rows,
        *,
        counts: Tensor | None,
        group_sizes: list[int],
        class_group: ProcessGroup | None,
        data_group: ProcessGroup | None,
    ) -> "GlobalLoss":
        """Exchange `mine` over both groups (collective).

        `group_sizes` lists the number of rows of each class group along `data`.
        """
        class_stats = _gather_stats(mine, all_gather_equal, class_group)
        total = loss.merge(class_stats)
        return cls(
            loss=loss,
            class_stats=class_stats,
            class_rank=group_rank(class_group),
            data_totals=_gather_stats(total, _uneven(group_sizes), data_group),
            data_rank=group_rank(data_group),
            counts=counts,
            rows=rows,
        )

    def value(self, mine: Stats) -> Tensor:
        """Return the loss of the global batch, given this rank's statistics `mine`."""
        class_stats = [*self.class_stats]
        class_stats[self.class_rank] = mine
        data_totals = [*self.data_totals]
        data_totals[self.data_rank] = self.loss.merge(class_stats)
        total = data_totals[0]
        if len(data_totals) > 1:
            total = tuple(torch.cat(column) for column in zip(*data_totals, strict=True))
        if self.counts is not None:
            total = tuple(stat[self.counts] for stat in total)
        return self.loss.value(total, self.rows)

    def gradients(self, of_blocks: BlockStatistics, grad_loss: Tensor) -> list[Stats]:
        """Return the gradient with respect to the statistics of each of this rank's blocks."""
        leaves = [tuple(stat.detach().requires_grad_() for stat in stats) for stats in of_blocks]
        if not leaves:
            return []
        with torch.enable_grad():
            value = self.value(self.loss.merge(leaves))
        flat = [stat for stats in leaves for stat in stats]
        grads = torch.autograd.grad(
            value, flat, grad_loss.to(value.dtype), allow_unused=True, materialize_grads=True
        )
        width = len(leaves[0])
        return [tuple(grads[i : i + width]) for i in range(0, len(grads), width)]


def _gather_stats(
    stats: Stats, gather: Callable[[Tensor, ProcessGroup | None], list[Tensor]], group: Any
) -> list[Stats]:
    """Gather all ranks' statistics in one collective, packed into a tensor [rows, width]."""
    if group is None:
        return [stats]
    widths = [math.prod(stat.shape[1:]) for stat in stats]
    columns = [stat.reshape(-1, width) for stat, width in zip(stats, widths, strict=True)]
    packed = torch.cat(columns, dim=1)
    return [
        tuple(
            part.reshape(len(part), *stat.shape[1:])
            for part, stat in zip(gathered.split(widths, dim=1), stats, strict=True)
        )
        for gathered in gather(packed, group)
    ]


def _uneven(sizes: list[int]) -> Callable[[Tensor, ProcessGroup | None], list[Tensor]]:
    def gather(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
        return list(all_gather_rows(tensor, sizes, group).split(sizes))

    return gather
