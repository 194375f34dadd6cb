"""Which class stands behind each `kind`, and how a recipe's loss is made."""

import numpy as np
import torch

from heads.config import LossConfig
from heads.losses.base import Loss
from heads.losses.binary_cross_entropy import BinaryCrossEntropy, NoiseContrastiveEstimation
from heads.losses.cross_entropy import BatchCrossEntropy, CrossEntropy, SelfNormalisation
from heads.losses.divergences import (
    SigmoidCauchySchwarz,
    SigmoidTanimoto,
    SoftmaxCauchySchwarz,
    SoftmaxTanimoto,
)
from heads.losses.hierarchical import HierarchicalSoftmax
from heads.losses.margin import BatchMaxMargin, MaxMargin, TopKHinge
from heads.losses.quadratic import CorrectClassQuadratic, Quadratic
from heads.losses.similarity import SimLoss
from heads.losses.smooth_topk import SmoothTopK
from heads.losses.spherical import SphericalBound, SphericalSoftmax, TaylorSoftmax
from heads.tree import LabelTree

LOSSES: dict[str, type[Loss]] = {
    "ce": CrossEntropy,
    "batch_ce": BatchCrossEntropy,
    "max_margin": MaxMargin,
    "batch_max_margin": BatchMaxMargin,
    "self_norm": SelfNormalisation,
    "nce": NoiseContrastiveEstimation,
    "bce": BinaryCrossEntropy,
    "softmax_cs": SoftmaxCauchySchwarz,
    "sigmoid_cs": SigmoidCauchySchwarz,
    "softmax_tanimoto": SoftmaxTanimoto,
    "sigmoid_tanimoto": SigmoidTanimoto,
    "topk_hinge": TopKHinge,
    "smooth_topk": SmoothTopK,
    "quadratic": Quadratic,
    "ccql": CorrectClassQuadratic,
    "taylor_softmax": TaylorSoftmax,
    "spherical_softmax": SphericalSoftmax,
    "spherical_bound": SphericalBound,
    "simloss": SimLoss,
    "hierarchical_softmax": HierarchicalSoftmax,
}


def build_loss(
    config: LossConfig,
    *,
    num_classes: int,
    label_vectors: np.ndarray | None = None,
    class_counts: np.ndarray | None = None,
    device: torch.device | str = "cpu",
) -> Loss:
    """The loss that a recipe's `head.loss` names, with its hyperparameters.

    `label_vectors` [K, D] are what simloss compares classes by, `class_counts` [K] the training
    samples of each class for the noise of nce. Raises ValueError where what it needs is missing or
    a hyperparameter does not fit the number of classes.
    """
    options = config.model_dump(exclude={"kind"})
    match config.kind:
        case "nce":
            del options["noise"]
            options["noise"] = _noise(config.noise, num_classes, class_counts).to(device)
        case "simloss":
            if label_vectors is None:
                raise ValueError(
                    "head.loss simloss needs label vectors and the shards carry none: choose "
                    "another loss, or shards whose source gives label vectors"
                )
            options["vectors"] = torch.from_numpy(label_vectors).to(device)
        case "topk_hinge" | "smooth_topk" if config.k >= num_classes:
            raise ValueError(
                f"head.loss.k is {config.k} and there are {num_classes} classes: lower k"
            )
    return LOSSES[config.kind](**options)


def example_loss(config: LossConfig, num_classes: int = 128) -> Loss:
    """The loss of a recipe with random label vectors, uniform noise or a flat tree in place of its
    data: for properties that depend on the hyperparameters alone."""
    if config.kind == "hierarchical_softmax":
        return HierarchicalSoftmax(LabelTree.dense(num_classes))
    vectors = np.random.default_rng(0).normal(size=(num_classes, 300)).astype(np.float32)
    return build_loss(config, num_classes=num_classes, label_vectors=vectors)


def _noise(kind: str, num_classes: int, class_counts: np.ndarray | None) -> torch.Tensor:
    """q [K]; a class that no sample has keeps a little, as if it had half a sample."""
    if kind == "uniform" or class_counts is None:
        return torch.full((num_classes,), 1 / num_classes, dtype=torch.float64)
    counts = torch.from_numpy(np.maximum(class_counts, 0.5)).to(torch.float64)
    return counts / counts.sum()
