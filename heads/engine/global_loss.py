"""The loss of the global batch as a function of one rank's statistics.

After one exchange, every rank has the statistics of all ranks. Each rank treats the statistics of
the others as constants and differentiates with respect to its own, without a further collective.
For example, the cross-entropy of a row over two ranks is log(e^a + e^b) - z_y, where a and b are
the logsumexp of the logits on rank 0 and on rank 1. Rank 0 computes the derivative with respect to
a, e^a / (e^a + e^b), and rank 1 the derivative with respect to b. Both compute the same loss.

The statistics of a class group are either gathered and merged on each rank, or, if there is much to
gather, merged by all-reduces (`reduces`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import (
    all_gather_equal,
    all_gather_rows,
    all_reduce_max,
    all_reduce_sum,
    group_rank,
    group_size,
)
from heads.losses import Loss, Reduction, Rows, Stats

# A link sends this many bytes in about the time in which another collective starts: 2 MB at 50 GB/s
# between nodes and 40 us, 7 MB at 450 GB/s within a node and 15 us.
_WORTH_A_COLLECTIVE = 2 << 20


def global_loss(
    loss: Loss,
    parts: Sequence[Stats],
    rows: Rows,
    *,
    identity: Callable[[], Stats],
    sources: Tensor | None,
    group_sizes: list[int],
    class_group: ProcessGroup | None,
    data_group: ProcessGroup | None,
) -> Tensor:
    """Exchange this rank's statistics over both groups and return the loss, a scalar (collective).

    `parts` are the statistics of disjoint parts of this rank's classes, none for a rank without
    classes, and `identity` returns those of such a rank. The loss is differentiable with respect to
    `parts`; the statistics of other ranks are constants.

    The ranks of a class group have different classes and the same rows, so their statistics are
    merged. Along `data`, the class groups have different rows, so their totals are concatenated.
    `sources` lists, for each row of `rows`, the row from which to take the statistics (None: each
    from itself). `group_sizes` lists the number of rows of each class group along `data`.
    """
    mine = loss.merge(parts) if parts else identity()
    total = _merged_over_ranks(loss, mine, class_group)
    totals = _gathered(total, _uneven(group_sizes), data_group)
    if len(totals) > 1:
        total = tuple(torch.cat(column) for column in zip(*totals, strict=True))
    if sources is not None:
        total = tuple(stat.index_select(0, sources) for stat in total)
    return loss.value(total, rows)


def reduces(num_ranks: int, num_bytes: int, shift_bytes: int) -> bool:
    """Return whether statistics with `Loss.reductions` are merged by all-reduces.

    `num_bytes` is the size of one rank's statistics, of which `shift_bytes` are logsumexps. With R
    ranks, a rank sends R - 1 times its statistics if they are gathered. An all-reduce sends
    2 (R - 1) / R times its tensor, and there are two: the maximum of the logsumexps, by which they
    are shifted, and the sum of all statistics.
    """
    gathered = (num_ranks - 1) * num_bytes
    reduced = 2 * (num_ranks - 1) * (num_bytes + shift_bytes) // num_ranks
    return gathered - reduced > _WORTH_A_COLLECTIVE


def _merged_over_ranks(loss: Loss, mine: Stats, group: ProcessGroup | None) -> Stats:
    """Merge the statistics of the ranks of a class group (collective)."""
    if group is None:
        return mine
    if loss.reductions:
        logs = [
            stat
            for stat, reduction in zip(mine, loss.reductions, strict=True)
            if reduction is Reduction.LOGSUMEXP
        ]
        sizes = (sum(stat.nbytes for stat in each) for each in (mine, logs))
        if reduces(group_size(group), *sizes):
            total: Stats = _ReducedStatistics.apply(loss.reductions, group, *mine)
            return total
    return loss.merge(_gathered(mine, all_gather_equal, group))


class _ReducedStatistics(torch.autograd.Function):
    """Sums and logsumexps over the ranks of a group.

    All ranks get the same bits, because each element is added up once and then copied (in gloo's
    and NCCL's rings, in NCCL's trees and in a switch). Backward is not a collective: it computes
    the gradient of this rank's loss with respect to this rank's statistics.
    """

    @staticmethod
    def forward(
        ctx: Any, reductions: Sequence[Reduction], group: ProcessGroup, *mine: Tensor
    ) -> Stats:
        shifts = _shifts(reductions, group, mine)
        terms = [
            stat if shift is None else (stat - shift).exp()
            for stat, shift in zip(mine, shifts, strict=True)
        ]
        total = tuple(
            stat if shift is None else stat.log() + shift
            for stat, shift in zip(_in_one(terms, group, all_reduce_sum), shifts, strict=True)
        )
        ctx.reductions = reductions
        ctx.save_for_backward(*mine, *total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        mine, totals = saved[: len(grads)], saved[len(grads) :]
        by_mine = (
            grad * (stat - _finite(total)).exp() if reduction is Reduction.LOGSUMEXP else grad
            for reduction, stat, total, grad in zip(
                ctx.reductions, mine, totals, grads, strict=True
            )
        )
        return None, None, *by_mine


def _shifts(
    reductions: Sequence[Reduction], group: ProcessGroup, mine: Stats
) -> list[Tensor | None]:
    """Return the maximum of each logsumexp over the ranks, 0 if it is infinite, and None for each
    sum (collective)."""
    logs = [i for i, reduction in enumerate(reductions) if reduction is Reduction.LOGSUMEXP]
    found: list[Tensor | None] = [None] * len(mine)
    if logs:
        largest = _in_one([mine[i] for i in logs], group, all_reduce_max)
        for i, stat in zip(logs, largest, strict=True):
            found[i] = _finite(stat)
    return found


def _finite(stat: Tensor) -> Tensor:
    return stat.where(stat.isfinite(), 0)


def _in_one(
    stats: Sequence[Tensor],
    group: ProcessGroup,
    all_reduce: Callable[[Tensor, ProcessGroup | None], Tensor],
) -> list[Tensor]:
    """Reduce several tensors in one collective."""
    packed = all_reduce(torch.cat([stat.reshape(-1) for stat in stats]), group)
    parts = packed.split([stat.numel() for stat in stats])
    return [part.view(stat.shape) for part, stat in zip(parts, stats, strict=True)]


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
