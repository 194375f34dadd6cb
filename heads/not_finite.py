"""The error of a loss that is NaN, which names the ranks and rows where numbers are not finite."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_gather_equal

_NAMED_ROWS = 8
_NAMED_RANKS = 8


def nan_loss(
    features: Tensor,
    held: Tensor,
    bias: Tensor | None,
    class_group: ProcessGroup | None,
    data_group: ProcessGroup | None,
) -> FloatingPointError:
    """The same error on every rank (collective), which names what is not finite in each rank's
    `features` [b, d], vectors [n, d] and their `bias` [n]. Rows are counted from 0."""
    mine = torch.tensor(_counted(features, held, bias), device=features.device)
    of_group = torch.stack(all_gather_equal(mine, class_group))
    ranks = torch.cat(all_gather_equal(of_group, data_group)).tolist()
    lines = [line for numbers in ranks if (line := _line(*numbers))]
    if len(lines) > _NAMED_RANKS:
        lines = [*lines[:_NAMED_RANKS], f"and {len(lines) - _NAMED_RANKS} more ranks"]
    where = "; ".join(lines) or "features and weight vectors are finite on every rank"
    return FloatingPointError(
        f"the loss is NaN; {where}: lower the learning rate, or check the inputs"
    )


def _counted(features: Tensor, held: Tensor, bias: Tensor | None) -> list[int]:
    """This rank, its rows and how many are not finite, the same for its vectors with their bias,
    and the first rows that are not finite."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = (~features.isfinite().all(1)).nonzero().flatten().tolist()
    finite = held.isfinite().all(1)
    if bias is not None:
        finite &= bias.isfinite()
    vectors = int((~finite).sum())
    named = rows[:_NAMED_ROWS] + [-1] * (_NAMED_ROWS - len(rows))
    return [rank, len(features), len(rows), len(held), vectors, *named]


def _line(rank: int, num_rows: int, rows: int, num_vectors: int, vectors: int, *named: int) -> str:
    if not rows and not vectors:
        return ""
    shown = ", ".join(str(row) for row in named if row >= 0) + (", …" if rows > len(named) else "")
    which = f" (row{'s' if rows > 1 else ''} {shown})" if rows else ""
    return (
        f"on rank {rank}, {rows} of {num_rows} rows of features{which} and {vectors} of "
        f"{num_vectors} weight vectors are not finite"
    )
