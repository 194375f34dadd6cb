"""Margin losses, which depend on the true logit and the few largest false logits of a row."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from heads.losses.base import STRICT, Block, Loss, Rows, Stats
from heads.topk import decode_ids, encode_ids, largest_columns, sort_largest

# Padding ID for rows with fewer false classes than `num_largest`. It is larger than any class ID.
_NO_CLASS = 1 << 35


class LargestFalse(Loss):
    """A function of z_y and the `num_largest` largest false logits [B, k].

    Ties go to the lowest class ID.
    """

    num_largest: int
    without_tile = "it needs the largest logits of a row"

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        false = block.false_logits(logits_BC)
        columns = largest_columns(false.detach(), block.class_ids, self.num_largest)
        values = false.gather(1, columns)
        ids = torch.where(values == -torch.inf, _NO_CLASS, block.class_ids[columns])
        return self._filled(values, ids, block.true)

    def merge(self, parts: Sequence[Stats]) -> Stats:
        values, digits, true = zip(*parts, strict=True)
        ids = decode_ids(torch.cat(digits, dim=1))
        largest, of = sort_largest(torch.cat(values, dim=1), ids, self.num_largest)
        return largest, encode_ids(of, largest.dtype), torch.stack(true).sum(0)

    def identity(self, like: Tensor) -> Stats:
        nothing = like.new_empty(len(like), 0)
        return self._filled(nothing, nothing.to(torch.int64), torch.zeros_like(like))

    def _filled(self, values: Tensor, ids: Tensor, true: Tensor) -> Stats:
        missing = self.num_largest - values.shape[1]
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        ids = torch.nn.functional.pad(ids, (0, missing), value=_NO_CLASS)
        return values, encode_ids(ids, values.dtype), true


@dataclass(frozen=True, config=STRICT)
class MarginLoss(LargestFalse):
    """max(0, gamma - z_y + max of the false z), averaged over rows."""

    gamma: float = Field(default=1.0, gt=0, description="margin")

    num_largest = 1

    def value(self, total: Stats, rows: Rows) -> Tensor:
        largest, _, true = total
        return rows.mean(torch.relu(self.gamma - true + largest[:, 0]))


@dataclass(frozen=True, config=STRICT)
class MaxMargin(MarginLoss):
    """max(0, gamma - z_y + max of the false z), averaged over rows (Eq. 2 of paper 002).

    Not aligned: only differences between logits within a row matter (section 3.2 of paper 002).
    """

    kind: Literal["max_margin"] = Field(default="max_margin", kw_only=True, repr=False)

    paper = "002 eq 2"
    statistic = "max of the false z, z_y"
    aligned = False


@dataclass(frozen=True, config=STRICT)
class BatchMaxMargin(MarginLoss):
    """The mean of max_margin, plus 1/m times the same hinge over the batch.

    This is definition 3 of paper 002. The hinge over the batch compares the smallest true logit
    with the largest false logit of the batch. A training step needs at least two rows.

    Aligned: if the loss is below gamma / m, the smallest true logit of the batch is above its
    largest false logit (appendix D of paper 002).
    """

    kind: Literal["batch_max_margin"] = Field(default="batch_max_margin", kw_only=True, repr=False)
    paper = "002 def 3"
    statistic = "max of the false z, z_y (their extremes over the batch)"
    aligned = True
    couples_rows = True
    accepts_mixed_labels = False  # each label of a mixed row would be a false class for the other

    def value(self, total: Stats, rows: Rows) -> Tensor:
        largest, _, true = total
        # Use min and max over a dimension: if rows are tied, only one of them gets the gradient,
        # whereas a reduction over all elements would divide it among them.
        gap = true.min(dim=0).values - largest[:, 0].max(dim=0).values
        return super().value(total, rows) + torch.relu(self.gamma - gap) / len(true)


@dataclass(frozen=True, config=STRICT)
class TopKHinge(LargestFalse):
    """max(0, alpha + (k-th largest false z - z_y) / k), averaged over rows (Eq. 8 of paper 003).

    This is the limit of `smooth_topk` as tau -> 0. Eq. 6 differs by a factor of 1/k on the scores.

    Not aligned: only differences between logits within a row matter, and k - 1 false logits of
    the same row may be above the true one.
    """

    kind: Literal["topk_hinge"] = Field(default="topk_hinge", kw_only=True, repr=False)
    k: int = Field(default=5, gt=0, description="number of predictions")
    alpha: float = Field(default=1.0, ge=0, description="margin")

    paper = "003 eq 8"
    statistic = "k largest false z, z_y"
    aligned = False

    @property
    def num_largest(self) -> int:  # type: ignore[override]
        return self.k

    def check_classes(self, num_classes: int) -> None:
        if self.k >= num_classes:
            raise ValueError(
                f"head.loss.k is {self.k}, but there are only {num_classes} classes: lower k"
            )

    def value(self, total: Stats, rows: Rows) -> Tensor:
        self.check_classes(rows.num_classes)
        largest, _, true = total
        # NaN is sorted first and would not reach the k-th value: propagate it explicitly.
        kth = largest[:, -1].where(~largest[:, 0].isnan(), torch.nan)
        return rows.mean(torch.relu(self.alpha + (kth - true) / self.k))
