"""Label trees, the structure of all class weights: building, naming and storing them."""

from heads.tree.cover import CoverTree, build_cover_tree
from heads.tree.hierarchy import Hierarchy, label_tree_of_paths, read_parent_table
from heads.tree.label_tree import LabelTree
from heads.tree.named_tree import NamedTree
from heads.tree.vectors import load_label_vectors, project, read_label_vectors
from heads.tree.wordnet import WordNet, read_wordnet

__all__ = [
    "CoverTree",
    "Hierarchy",
    "LabelTree",
    "NamedTree",
    "WordNet",
    "build_cover_tree",
    "label_tree_of_paths",
    "load_label_vectors",
    "project",
    "read_label_vectors",
    "read_parent_table",
    "read_wordnet",
]
