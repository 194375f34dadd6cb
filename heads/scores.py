"""What a logit is worth: the score that evaluation, thresholds and serving compare."""

from typing import Literal

from torch import Tensor

ScoreKind = Literal["logit", "taylor", "spherical"]


def score(kind: ScoreKind, logits: Tensor, *, eps: float = 0.0) -> Tensor:
    """Scores of `logits`, of any shape, increasing in belief.

    `taylor` is 1 + z + z^2 / 2, `spherical` z^2 + eps (004): for both a logit far below zero is as
    much believed as one far above, so the logits themselves must not be compared.
    """
    match kind:
        case "logit":
            return logits
        case "taylor":
            return 1 + logits + logits.square() / 2
        case "spherical":
            return logits.square() + eps
