"""The loss of the global batch as a function of one rank's statistics.

All other ranks' statistics are constants to a rank: it differentiates by its own alone, and needs
no collective for that.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_gather_equal, all_gather_rows, group_rank
from heads.losses import Loss, Rows, Stats


@dataclass(frozen=True)
class Others:
    """Statistics of the other ranks, constants to this one, and where its own fit among them."""

    loss: Loss
    class_parts: list[Stats]
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
        world_rows: list[int],
        class_group: ProcessGroup | None,
        data_group: ProcessGroup | None,
    ) -> "Others":
        """Exchange `mine` (collective); `world_rows` are the rows of each class group."""
        class_parts = _gather_stats(mine, all_gather_equal, class_group)
        total = loss.merge(class_parts)
        return cls(
            loss=loss,
            class_parts=class_parts,
            class_rank=group_rank(class_group),
            data_totals=_gather_stats(total, _uneven(world_rows), data_group),
            data_rank=group_rank(data_group),
            counts=counts,
            rows=rows,
        )

    def value(self, mine: Stats) -> Tensor:
        """The loss of the global batch as a function of this rank's own statistics."""
        class_parts = [*self.class_parts]
        class_parts[self.class_rank] = mine
        data_totals = [*self.data_totals]
        data_totals[self.data_rank] = self.loss.merge(class_parts)
        total = tuple(torch.cat(column) for column in zip(*data_totals, strict=True))
        if self.counts is not None:
            total = tuple(stat[self.counts] for stat in total)
        return self.loss.value(total, self.rows)


def gradient_of_parts(
    loss: Loss, parts: Sequence[Stats], others: Others, grad_loss: Tensor
) -> list[Stats]:
    """The gradient of the loss with respect to the statistics of each of this rank's blocks."""
    if not parts:
        return []
    leaves = [tuple(stat.detach().requires_grad_() for stat in part) for part in parts]
    with torch.enable_grad():
        value = others.value(loss.merge(leaves))
    flat = [stat for part in leaves for stat in part]
    grads = torch.autograd.grad(
        value, flat, grad_loss.to(value.dtype), allow_unused=True, materialize_grads=True
    )
    width = len(leaves[0])
    return [tuple(grads[i : i + width]) for i in range(0, len(grads), width)]


def _gather_stats(
    stats: Stats, gather: Callable[[Tensor, ProcessGroup | None], list[Tensor]], group: Any
) -> list[Stats]:
    """All ranks' statistics, sent as one [rows, width] tensor."""
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
