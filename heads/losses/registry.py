"""The registry of losses for `head.loss.kind` in a recipe."""

from typing import Annotated, get_args

from pydantic import Discriminator, SerializeAsAny, WrapValidator

from heads.losses.asymmetric import Asymmetric
from heads.losses.base import Loss
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
