"""The losses, and `LOSSES`, which maps the `kind` in a recipe to its loss."""

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
from heads.losses.registry import LOSSES, LossConfig
from heads.losses.similarity import SimLoss
from heads.losses.smooth_topk import SmoothTopK
from heads.losses.spherical import SphericalBound, SphericalSoftmax, TaylorSoftmax

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
