"""The losses, and `LOSSES`, which maps the `kind` in a recipe to its loss.

`AnyLoss` is the registry of the classes that a recipe can select with `head.loss.kind`.
"""

from typing import Annotated, get_args

from pydantic import Discriminator, SerializeAsAny, WrapValidator

from heads.losses.asymmetric import Asymmetric
from heads.losses.base import (
    STRICT,
    Block,
    Choice,
    ClassFacts,
    HeldClasses,
    LabelPositions,
    Loss,
    Reduction,
    Rows,
    ScoreKind,
    Stats,
    logsumexp,
    score,
)
from heads.losses.binary_cross_entropy import BinaryCrossEntropy, NoiseContrastiveEstimation
from heads.losses.cross_entropy import BatchCrossEntropy, CrossEntropy, SelfNormalization
from heads.losses.decoupled_softmax import DecoupledSoftmax
from heads.losses.divergences import (
    SigmoidCauchySchwarz,
    SigmoidTanimoto,
    SoftmaxCauchySchwarz,
    SoftmaxTanimoto,
)
from heads.losses.hierarchical import HierarchicalSoftmax
from heads.losses.max_margin import BatchMaxMargin, MaxMargin, TopKHinge
from heads.losses.quadratic import CorrectClassQuadratic, Quadratic
from heads.losses.similarity import SimLoss
from heads.losses.smooth_topk import SmoothTopK
from heads.losses.spherical import SphericalBound, SphericalSoftmax, TaylorSoftmax

AnyLoss = (
    CrossEntropy
    | BatchCrossEntropy
    | DecoupledSoftmax
    | MaxMargin
    | BatchMaxMargin
    | SelfNormalization
    | NoiseContrastiveEstimation
    | BinaryCrossEntropy
    | Asymmetric
    | SoftmaxCauchySchwarz
    | SigmoidCauchySchwarz
    | SoftmaxTanimoto
    | SigmoidTanimoto
    | TopKHinge
    | SmoothTopK
    | Quadratic
    | CorrectClassQuadratic
    | TaylorSoftmax
    | SphericalSoftmax
    | SphericalBound
    | SimLoss
    | HierarchicalSoftmax
)

LossConfig = Annotated[
    SerializeAsAny[AnyLoss],
    Discriminator("kind"),
    # Accept an instance of any loss, including classes that are not in this registry.
    WrapValidator(lambda value, validate: value if isinstance(value, Loss) else validate(value)),
]

LOSSES: dict[str, type[Loss]] = {loss.kind: loss for loss in get_args(AnyLoss)}

__all__ = [
    "LOSSES",
    "STRICT",
    "Asymmetric",
    "BatchCrossEntropy",
    "BatchMaxMargin",
    "BinaryCrossEntropy",
    "Block",
    "Choice",
    "ClassFacts",
    "CorrectClassQuadratic",
    "CrossEntropy",
    "DecoupledSoftmax",
    "HeldClasses",
    "HierarchicalSoftmax",
    "LabelPositions",
    "Loss",
    "LossConfig",
    "MaxMargin",
    "NoiseContrastiveEstimation",
    "Quadratic",
    "Reduction",
    "Rows",
    "ScoreKind",
    "SelfNormalization",
    "SigmoidCauchySchwarz",
    "SigmoidTanimoto",
    "SimLoss",
    "SmoothTopK",
    "SoftmaxCauchySchwarz",
    "SoftmaxTanimoto",
    "SphericalBound",
    "SphericalSoftmax",
    "Stats",
    "TaylorSoftmax",
    "TopKHinge",
    "logsumexp",
    "score",
]
