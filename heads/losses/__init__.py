"""The losses, by the `kind` that recipes use."""

from heads.config import LossConfig
from heads.losses.base import Block, Loss, Rows, Stats
from heads.losses.binary_cross_entropy import BinaryCrossEntropy
from heads.losses.cross_entropy import BatchCrossEntropy, CrossEntropy

LOSSES: dict[str, type[Loss]] = {
    "ce": CrossEntropy,
    "batch_ce": BatchCrossEntropy,
    "bce": BinaryCrossEntropy,
}


def build_loss(config: LossConfig) -> Loss:
    """The loss that a recipe's `head.loss` names, with its hyperparameters."""
    return LOSSES[config.kind](**config.model_dump(exclude={"kind"}))


__all__ = [
    "LOSSES",
    "BatchCrossEntropy",
    "BinaryCrossEntropy",
    "Block",
    "CrossEntropy",
    "Loss",
    "Rows",
    "Stats",
    "build_loss",
]
