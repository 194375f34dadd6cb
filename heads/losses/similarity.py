"""SimLoss: probability on a class like the true one counts in part (Kobs et al. 2020)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heads.losses.base import Block, Loss, Reduction, Rows, Stats, logsumexp


@dataclass(frozen=True, eq=False)
class SimLoss(Loss):
    """-log sum_j S_yj p_j with S = max(0, (cos - lower) / (1 - lower)), the mean over rows.

    `vectors` [K, D] are label vectors; S is computed for the rows and classes at hand and is never
    K x K. Not aligned: only differences within a row count.
    """

    vectors: Tensor
    lower: float = 0.0

    kind = "simloss"
    paper = "SimLoss, cited by 000"
    statistic = "logsumexp z, logsumexp (z + log sim[y])"
    aligned = False
    reductions = (Reduction.LOGSUMEXP, Reduction.LOGSUMEXP)

    def __post_init__(self) -> None:
        if not -1 <= self.lower < 1:
            raise ValueError(f"simloss lower is {self.lower}: give a cosine from -1 to below 1")
        if not self.vectors.isfinite().all():
            raise ValueError("simloss label vectors must be finite")
        unit = torch.nn.functional.normalize(self.vectors, dim=1)
        object.__setattr__(self, "vectors", unit)

    def check_classes(self, num_classes: int) -> None:
        if self.vectors.dim() != 2 or len(self.vectors) != num_classes:
            raise ValueError(
                f"simloss label vectors have shape {list(self.vectors.shape)} and there are "
                f"{num_classes} classes: give one row a class"
            )

    def to(self, device: torch.device) -> "SimLoss":
        if self.vectors.device == device:
            return self
        return replace(self, vectors=self.vectors.to(device))

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return logsumexp(logits_BC), logsumexp(logits_BC + self._log_similarity(block, logits_BC))

    def value(self, total: Stats, rows: Rows) -> Tensor:
        every, similar = total
        return rows.mean(every - similar)

    @torch.no_grad()
    def _log_similarity(self, block: Block, like: Tensor) -> Tensor:
        left, right = (self.vectors[ids].to(like.dtype) for ids in (block.labels, block.class_ids))
        cosine = left @ right.T
        similarity = cosine.sub_(self.lower).div_(1 - self.lower).clamp_(0, 1)
        # A class is like itself, whatever rounding or a zero vector says.
        similarity[block.label_places] = 1
        return similarity.log_()
