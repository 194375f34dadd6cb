"""SimLoss: cross-entropy with partial credit for similar classes (Kobs et al. 2020)."""

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from heads.losses.base import (
    STRICT,
    Block,
    ClassFacts,
    Loss,
    Reduction,
    Rows,
    Stats,
    logsumexp,
)
from heads.similarity import of_cosines, unit_rows


@dataclass(frozen=True, config=STRICT)
class SimLoss(Loss):
    """-log sum_j S_yj p_j with S = max(0, (cos - lower) / (1 - lower)), averaged over rows.

    S is computed from the label vectors, block by block; the K x K matrix is never stored.

    Not aligned: only differences between logits within a row matter.
    """

    kind: Literal["simloss"] = Field(default="simloss", kw_only=True, repr=False)
    lower: float = Field(default=0.0, ge=-1, lt=1, description="largest cosine at which S is 0")

    # Set by `prepare`: label vectors [K, D], scaled to unit length.
    vectors: ClassVar[Tensor]

    paper = "SimLoss, cited by 000"
    without_tile = "it needs the similarity of every class to the label of a row"
    statistic = "logsumexp z, logsumexp (z + log sim[y])"
    aligned = False
    reductions = (Reduction.LOGSUMEXP, Reduction.LOGSUMEXP)

    def prepare(self, facts: ClassFacts) -> Self:
        vectors = facts.label_vectors
        if vectors is None and "vectors" in vars(self):
            return super().prepare(facts)
        if vectors is None:
            raise ValueError(
                "simloss needs label vectors, but there are none: pass label_vectors, use shards "
                "with label vectors, or choose another loss"
            )
        if vectors.dim() != 2 or len(vectors) != facts.num_classes:
            raise ValueError(
                f"simloss: label_vectors have shape {list(vectors.shape)}, but there are "
                f"{facts.num_classes} classes: pass one row for each class"
            )
        class_ids = torch.arange(len(vectors), device=vectors.device)
        return self.with_constants(vectors=unit_rows(vectors, class_ids))

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        with torch.no_grad():
            left, right = (
                self.vectors[ids].to(logits_BC.dtype) for ids in (block.labels, block.class_ids)
            )
            similarity = of_cosines(left @ right.T, self.lower)
            # The similarity of a class to itself is 1, even after rounding and for a zero vector.
            log_similarity = block.positions.put(similarity, 1).log_()
        return logsumexp(logits_BC), logsumexp(logits_BC + log_similarity)

    def value(self, total: Stats, rows: Rows) -> Tensor:
        every, similar = total
        return rows.mean(every - similar)
