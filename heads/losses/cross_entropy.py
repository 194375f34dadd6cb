"""Cross-entropy and what is built on its statistics: self-normalisation and the batch version."""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.losses.base import Block, Loss, Reduction, Rows, Stats, logsumexp


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """-log p_y = logsumexp(z) - z_y, the mean over rows (002, eq 1).

    `label_smoothing` e puts e/K of the target on every class (Szegedy et al. 2016); `z_loss` c adds
    c logsumexp(z)^2, which keeps the logits' level in place (PaLM, Chowdhery et al. 2022).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    kind = "ce"
    paper = "002 eq 1"
    statistic = "logsumexp z, z_y (sum z under label smoothing)"
    aligned = False

    @property
    def reductions(self) -> tuple[Reduction, ...]:  # type: ignore[override]
        sums = (Reduction.SUM, Reduction.SUM) if self.label_smoothing else (Reduction.SUM,)
        return (Reduction.LOGSUMEXP, *sums)

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        stats = logsumexp(logits_BC), block.true
        return (*stats, logits_BC.sum(1)) if self.label_smoothing else stats

    def value(self, total: Stats, rows: Rows) -> Tensor:
        lse, target, *every = total
        if every:
            target = torch.lerp(target, every[0] / rows.num_classes, self.label_smoothing)
        return rows.mean(lse - target + self.z_loss * lse.square())


@dataclass(frozen=True)
class SelfNormalisation(Loss):
    """-log p_y + alpha log^2(sum exp z), the mean over rows (002, section 4.1)."""

    alpha: float = 0.1

    kind = "self_norm"
    paper = "002 section 4.1"
    statistic = "logsumexp z, z_y"
    aligned = True
    reductions = (Reduction.LOGSUMEXP, Reduction.SUM)

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return logsumexp(logits_BC), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        lse, true = total
        return rows.mean(lse - true + self.alpha * lse.square())


@dataclass(frozen=True)
class BatchCrossEntropy(Loss):
    """KL(P_B || Q_B) with one softmax over the whole batch (002, definition 2).

    P_B puts 1/m on each row's label (row weights in proportion), so the loss is logsumexp over rows
    and classes of z, less the mean of z_y, less log m.
    """

    kind = "batch_ce"
    paper = "002 def 2"
    statistic = "logsumexp z, z_y (one Z for the batch)"
    aligned = True
    couples_rows = True
    reductions = (Reduction.LOGSUMEXP, Reduction.SUM)

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return logsumexp(logits_BC), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        check_batch(self.kind, rows)
        lse, true = total
        share = torch.ones_like(true) if rows.weights is None else rows.weights
        share = share / share.sum()
        log_z = logsumexp(lse.unsqueeze(0)).squeeze(0)
        return log_z + (share * (share.log() - true)).sum()


def check_batch(kind: str, rows: Rows) -> None:
    """A batch loss compares rows with each other: ValueError where there is only one."""
    if rows.num_rows < 2:
        raise ValueError(
            f"{kind} needs a global batch of at least 2 rows, got {rows.num_rows}: "
            "raise train.global_batch"
        )
