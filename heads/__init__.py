"""What is learned on top of features: losses, class weights, label trees, the sharded engine.

Names load on first use, so that `heads.config` stays free of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heads.build import build_head, build_tree
    from heads.factored import FactoredHead
    from heads.head import ClassHead, ClassRows
    from heads.hierarchical import HierarchicalSoftmaxHead
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
    "FactoredHead",
    "HierarchicalSoftmaxHead",
    "LabelTree",
    "Loss",
    "build_cover_tree",
    "build_head",
    "build_tree",
]

_HOME = {
    "LOSSES": "heads.losses",
    "BatchCrossEntropy": "heads.losses",
    "BinaryCrossEntropy": "heads.losses",
    "ClassHead": "heads.head",
    "ClassRows": "heads.head",
    "CoverTree": "heads.tree",
    "CrossEntropy": "heads.losses",
    "FactoredHead": "heads.factored",
    "LabelTree": "heads.tree",
    "Loss": "heads.losses",
    "build_cover_tree": "heads.tree",
    "HierarchicalSoftmaxHead": "heads.hierarchical",
    "build_head": "heads.build",
    "build_tree": "heads.build",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'heads' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
