"""The loss of the global batch as a function of one rank's statistics.

After one exchange, every rank has the statistics of all ranks. Each rank treats the statistics of
the others as constants and differentiates with respect to its own, without a further collective.
For example, the cross-entropy of a row over two ranks is log(e^a + e^b) - z_y, where a and b are
the logsumexp of the logits on rank 0 and on rank 1. Rank 0 computes the derivative with respect to
a, e^a / (e^a + e^b), and rank 1 the derivative with respect to b. Both compute the same loss.

Each rank of a class group gathers the statistics of all ranks and merges them.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_gather_equal, all_gather_rows, group_rank
from heads.losses import Loss, Rows, Stats


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
    total = loss.merge(parts) if parts else identity()
    if class_group is not None:
        total = loss.merge(_gathered(total, all_gather_equal, class_group))

    def gather_rows(rows: Tensor, group: ProcessGroup) -> list[Tensor]:
        return list(all_gather_rows(rows, group_sizes, group).split(group_sizes))

    if data_group is not None:
        totals = _gathered(total, gather_rows, data_group)
        total = tuple(torch.cat(column) for column in zip(*totals, strict=True))
    if sources is not None:
        total = tuple(stat.index_select(0, sources) for stat in total)
    return loss.value(total, rows)


def _gathered(
    stats: Stats, gather: Callable[[Tensor, ProcessGroup], list[Tensor]], group: ProcessGroup
) -> list[Stats]:
    """Gather all ranks' statistics in one collective, packed into a tensor [rows, width].

    This rank's own statistics are returned unchanged, with their autograd graph.
    """
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
