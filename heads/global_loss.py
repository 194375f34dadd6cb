"""The loss of the global batch as a function of one rank's statistics.

After one exchange, every rank has the statistics of all ranks. Each rank treats the statistics of
the others as constants and differentiates with respect to its own, without a further collective.
For example, the cross-entropy of a row over two ranks is log(e^a + e^b) - z_y, where a and b are
the logsumexp of the logits on rank 0 and on rank 1. Rank 0 computes the derivative with respect to
a, e^a / (e^a + e^b), and rank 1 the derivative with respect to b. Both compute the same loss.
"""

import math
from collections.abc import Callable
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
        if self.num_blocks == 1:
            self._columns = tuple(stat.detach().unsqueeze(0) for stat in stats)
            return
        if not self._columns:
            self._columns = tuple(stat.new_empty((self.num_blocks, *stat.shape)) for stat in stats)
        for column, stat in zip(self._columns, stats, strict=True):
            column[index] = stat.detach()

    def leaves(self, *, with_graph: bool) -> list[Stats]:
        """Return the statistics of each block, as leaves of an autograd graph if `with_graph`."""
        blocks = zip(*self._columns, strict=True) if self._columns else ()
        return [tuple(stat.detach().requires_grad_(with_graph) for stat in each) for each in blocks]


@dataclass(frozen=True)
class GlobalLoss:
    """The loss of the global batch as a function of the statistics of this rank's blocks.

    `value` is the loss, a scalar. `of_blocks` contains the statistics of this rank's blocks. If
    `with_graph` was true, `value` has an autograd graph that starts at `of_blocks`; the statistics
    of other ranks are constants.
    """

    value: Tensor
    of_blocks: list[Stats]

    @classmethod
    def gather(
        cls,
        loss: Loss,
        statistics: BlockStatistics,
        rows: Rows,
        *,
        identity: Callable[[], Stats],
        counts: Tensor | None,
        group_sizes: list[int],
        class_group: ProcessGroup | None,
        data_group: ProcessGroup | None,
        with_graph: bool,
    ) -> "GlobalLoss":
        """Exchange this rank's statistics over both groups and compute the loss (collective).

        The ranks of a class group have different classes and the same rows, so their statistics
        are merged. Along `data`, the class groups have different rows, so their totals are
        concatenated. `counts` selects the rows that are not ignored (None: all). `group_sizes`
        lists the number of rows of each class group along `data`. `identity` returns the
        statistics of a rank without classes.
        """
        of_blocks = statistics.leaves(with_graph=with_graph)
        with torch.set_grad_enabled(with_graph):
            mine = loss.merge(of_blocks) if of_blocks else identity()
            total = loss.merge(_gathered(mine, all_gather_equal, class_group))
            totals = _gathered(total, _uneven(group_sizes), data_group)
            if len(totals) > 1:
                total = tuple(torch.cat(column) for column in zip(*totals, strict=True))
            if counts is not None:
                total = tuple(stat[counts] for stat in total)
            value = loss.value(total, rows)
        return cls(value, of_blocks)

    def gradients(self, grad_loss: Tensor) -> list[Stats]:
        """Return the gradient with respect to the statistics of each of this rank's blocks."""
        if not self.of_blocks:
            return []
        flat = [stat for stats in self.of_blocks for stat in stats]
        grads = torch.autograd.grad(
            self.value,
            flat,
            grad_loss.to(self.value.dtype),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        width = len(self.of_blocks[0])
        return [tuple(grads[i : i + width]) for i in range(0, len(grads), width)]


def _gathered(
    stats: Stats, gather: Callable[[Tensor, ProcessGroup | None], list[Tensor]], group: Any
) -> list[Stats]:
    """Gather all ranks' statistics in one collective, packed into a tensor [rows, width].

    This rank's own statistics are returned unchanged, with their autograd graph.
    """
    if group is None:
        return [stats]
    widths = [math.prod(stat.shape[1:]) for stat in stats]
    columns = [stat.detach().reshape(-1, width) for stat, width in zip(stats, widths, strict=True)]
    packed = torch.cat(columns, dim=1)
    ranks = [
        tuple(
            part.reshape(len(part), *stat.shape[1:])
            for part, stat in zip(gathered.split(widths, dim=1), stats, strict=True)
        )
        for gathered in gather(packed, group)
    ]
    ranks[group_rank(group)] = stats
    return ranks


def _uneven(sizes: list[int]) -> Callable[[Tensor, ProcessGroup | None], list[Tensor]]:
    def gather(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
        return list(all_gather_rows(tensor, sizes, group).split(sizes))

    return gather
