"""The smooth top-k loss, a function of elementary symmetric polynomials of exp(z / (k tau)), which
`symmetric.py` computes.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import softplus

from heads.losses.base import STRICT, Block, Loss, Rows, Stats
from heads.losses.log_polynomials import log_polynomials
from heads.losses.symmetric import (
    SymmetricStatistics,
    merge_statistics,
    no_scores,
    symmetric_statistics,
)

_MOST = 100  # the largest k for which float64 can represent all coefficients of the polynomials


@dataclass(frozen=True, config=STRICT)
class SmoothTopK(Loss):
    """tau softplus((alpha - z_y / k) / tau + log sigma_k - log sigma_(k-1)), averaged over rows.

    sigma_i is the i-th elementary symmetric polynomial of exp(z_j / (k tau)) over the false classes
    j. This is Eq. 10 of paper 003 with its two logarithms combined. With k = 1, tau = 1 and
    alpha = 0, the loss is cross-entropy. As tau -> 0, it tends to `topk_hinge`.

    Not aligned: only differences between logits within a row matter, and k - 1 false logits of
    the same row may be above the true one.
    """

    kind: Literal["smooth_topk"] = Field(default="smooth_topk", kw_only=True, repr=False)
    k: int = Field(default=5, ge=1, le=_MOST, description="number of predictions")
    tau: float = Field(
        default=1.0, gt=0, description="temperature; in the limit tau -> 0, the loss is topk_hinge"
    )
    alpha: float = Field(default=1.0, ge=0, description="margin")

    paper = "003 eq 10"
    without_tile = "it needs the 2k largest logits of a row"
    statistic = "2k largest false z, power sums of exp(z / k tau) over the other false z, z_y"
    aligned = False

    def check_classes(self, num_classes: int) -> None:
        if self.k >= num_classes:
            raise ValueError(
                f"head.loss.k is {self.k}, but there are only {num_classes} classes: lower k"
            )

    @property
    def _scale(self) -> float:
        return 1 / (self.k * self.tau)

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        stats = symmetric_statistics(logits_BC, block.label_columns, self.k, self._scale)
        return *stats, block.true

    def merge(self, parts: Sequence[Stats]) -> Stats:
        false = [SymmetricStatistics(leaders, sums) for leaders, sums, _ in parts]
        true = torch.stack([true for _, _, true in parts]).sum(0)
        return *merge_statistics(false, self._scale), true

    def identity(self, like: Tensor) -> Stats:
        return *no_scores(like, self.k), torch.zeros_like(like)

    def value(self, total: Stats, rows: Rows) -> Tensor:
        self.check_classes(rows.num_classes)
        leaders, sums, true = total
        previous, last = log_polynomials(SymmetricStatistics(leaders, sums), self._scale)
        # Use float64, because the difference of two scores is divided by tau, which may be tiny.
        kth = leaders[:, self.k - 1].detach().double()
        gap = (self.alpha * self.k + kth - true.double()) * self._scale
        # If fewer than k false classes are possible (not -inf), every prediction of k classes
        # contains y, and the loss is 0.
        exists = kth != -torch.inf
        excess = softplus((gap + last - previous).where(exists, -torch.inf), threshold=50)
        return rows.mean(self.tau * excess).to(true.dtype)
