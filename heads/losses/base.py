"""What a loss is: a commutative monoid of per-row logit statistics and a function of their total.

Shape letters: B rows, C classes of a block, K all classes, m rows of the global batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

Stats = tuple[Tensor, ...]


@dataclass(frozen=True)
class Block:
    """A block of classes as the rows of a batch see it.

    `class_ids` [C] names the columns; `label_columns` [B] is the column of each row's label, or -1
    where the label sits in another block.
    """

    class_ids: Tensor
    label_columns: Tensor

    def pick(self, logits_BC: Tensor) -> Tensor:
        """The label's logit [B]; 0 where the label is elsewhere, so that blocks add up to it."""
        picked = logits_BC.gather(1, self.label_columns.clamp(min=0).unsqueeze(1)).squeeze(1)
        return torch.where(self.label_columns >= 0, picked, 0)


@dataclass(frozen=True)
class Rows:
    """The rows of the global batch, for `Loss.value`."""

    num_rows: int
    num_classes: int


class Loss(ABC):
    """A loss over the logits of all classes, computed from statistics of blocks of them.

    `aligned` says whether the loss is aligned with the Principle of Logit Separation (002,
    definition 1). `couples_rows` says that `value` is not a mean of terms of one row each.
    """

    kind: ClassVar[str]
    paper: ClassVar[str]
    statistic: ClassVar[str]
    aligned: ClassVar[bool]
    couples_rows: ClassVar[bool] = False

    @abstractmethod
    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        """Statistics [B, ...] of each row's logits over the block's classes."""

    @abstractmethod
    def merge(self, parts: Sequence[Stats]) -> Stats:
        """Join the statistics of one or more disjoint blocks; associative and commutative."""

    @abstractmethod
    def identity(self, like: Tensor) -> Stats:
        """The statistics of no class at all, for the rows of `like` [B]."""

    @abstractmethod
    def value(self, total: Stats, rows: Rows) -> Tensor:
        """The loss, a scalar: the mean over the rows of the global batch."""

    def score(self, logits: Tensor) -> Tensor:
        """What evaluation, thresholds and serving compare; increasing in belief."""
        return logits

    def initial_bias(self, num_classes: int) -> float:
        """The bias of every class before training, where the head has biases."""
        return 0.0

    def hyperparameters(self) -> dict[str, Any]:
        """Names and values, for listings and model cards."""
        return {}


class _LogSumExp(torch.autograd.Function):
    """logsumexp over dim 1 whose gradient at a row of -inf is zero instead of NaN."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        result = torch.logsumexp(logits, dim=1)
        ctx.save_for_backward(logits, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        logits, result = ctx.saved_tensors
        shift = torch.where(result == -torch.inf, 0, result)
        return (logits - shift.unsqueeze(1)).exp_().mul_(grad.unsqueeze(1))


def logsumexp(logits_BC: Tensor) -> Tensor:
    """log(sum(exp(z))) over dim 1; -inf with a zero gradient where every z is -inf."""
    result: Tensor = _LogSumExp.apply(logits_BC)
    return result
