"""Label trees: the one structure behind all class weights, and the cover tree that builds it."""

from heads.tree.cover import CoverTree, build_cover_tree
from heads.tree.label_tree import LabelTree

__all__ = ["CoverTree", "LabelTree", "build_cover_tree"]
