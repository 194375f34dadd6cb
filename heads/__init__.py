"""What is learned on top of features: losses, class weights, label trees, the sharded engine."""

from heads.head import ClassHead, ClassRows, build_head
from heads.losses import LOSSES, BatchCrossEntropy, BinaryCrossEntropy, CrossEntropy, Loss
from heads.tree import CoverTree, LabelTree, build_cover_tree

__all__ = [
    "LOSSES",
    "BatchCrossEntropy",
    "BinaryCrossEntropy",
    "ClassHead",
    "ClassRows",
    "CoverTree",
    "CrossEntropy",
    "LabelTree",
    "Loss",
    "build_cover_tree",
    "build_head",
]
