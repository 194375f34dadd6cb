"""Classification heads: losses, class weights, label trees and the class-sharded engine."""

from heads.build import build_head, build_tree
from heads.clipping import clip_grad_norm_
from heads.factored import FactoredHead
from heads.fused_sgd import FusedSGD
from heads.gradients import sum_gradients, sum_sharded_gradients
from heads.head import ClassHead
from heads.hierarchical import HierarchicalSoftmaxHead
from heads.label_sets import LabelSets
from heads.logit_maps import ArcFace, ClassRows, CosFace, Cosine, Dot, NormFace, SphereFace
from heads.losses import LOSSES, BatchCrossEntropy, BinaryCrossEntropy, CrossEntropy, Loss
from heads.tree import CoverTree, LabelTree, build_cover_tree

__all__ = [
    "LOSSES",
    "ArcFace",
    "BatchCrossEntropy",
    "BinaryCrossEntropy",
    "ClassHead",
    "ClassRows",
    "CosFace",
    "Cosine",
    "CoverTree",
    "CrossEntropy",
    "Dot",
    "FactoredHead",
    "FusedSGD",
    "HierarchicalSoftmaxHead",
    "LabelSets",
    "LabelTree",
    "Loss",
    "NormFace",
    "SphereFace",
    "build_cover_tree",
    "build_head",
    "build_tree",
    "clip_grad_norm_",
    "sum_gradients",
    "sum_sharded_gradients",
]
