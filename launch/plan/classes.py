"""The classes of a plan: their number, their label tree and the number of training samples.

The numbers come from the shards if the shards are on this machine, otherwise from the command line.
For dense weights, no tensor of size K is allocated. A label tree is built from the shards, because
there is no other way to determine its shape.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.remote.config import is_url
from data.shards.manifest import MANIFEST, Manifest
from data.shards.mixture import read_manifests, united_manifest
from heads.build import build_tree
from heads.hierarchical import classes_at_leaves
from heads.tree import LabelTree
from heads.weights import shard_range
from trainer.config import Recipe
from trainer.run.training_data import class_paths_of, label_vectors_of


@dataclass(frozen=True)
class Classes:
    """Counts of classes and of nodes of the label tree.

    nodes: nodes to shard; inner: nodes with children; depth: mean number of nodes on the path of a
    class; boundary: nodes that ranks other than their owners need. exact: False if the label tree
    is not available and the other counts are therefore upper bounds.
    """

    num_classes: int
    nodes: int
    depth: float
    boundary: int
    inner: int
    plain: bool
    exact: bool

    def max_nodes(self, group_size: int) -> int:
        """Return the number of nodes on the rank with the most nodes."""
        return -(-self.nodes // group_size)

    def min_nodes(self, group_size: int) -> int:
        """Return the number of nodes on the last rank, which has the fewest."""
        start, stop = shard_range(self.nodes, group_size - 1, group_size)
        return stop - start

    def max_classes(self, group_size: int) -> int:
        """Return the number of classes on the rank with the most classes.

        Assumes that the classes are spread evenly over the nodes.
        """
        nodes = self.max_nodes(group_size)
        return min(nodes, -(-nodes * self.num_classes // self.nodes))


def shards_of(recipe: Recipe) -> Manifest | None:
    """Return the manifest of the recipe's shards, with the classes of a mixture, or None if they
    are not on this machine.
    """
    data = recipe.data
    if any(is_url(folder) or not (Path(folder) / MANIFEST).is_file() for folder in data.addresses):
        return None
    own, *others = read_manifests(data)
    return united_manifest(data, own, others)


def num_samples(recipe: Recipe, manifest: Manifest | None, given: int | None) -> int | None:
    """Return the number of training samples per epoch, or None if unknown."""
    if given is not None:
        return given
    if recipe.data.stream is not None:
        return recipe.data.stream.samples
    return recipe.data.sampling.epoch_samples or stored_samples(recipe, manifest)


def stored_samples(recipe: Recipe, manifest: Manifest | None) -> int | None:
    """Return the number of samples in the training splits of the shards, or None if unknown."""
    if manifest is None:
        return None
    if not recipe.data.mixture:
        shards = [*manifest.of_split(recipe.data.train_split, key="data.train_split")]
        return sum(shard.samples for shard in shards)
    sets = recipe.data.mixture
    manifests = read_manifests(recipe.data)[1:]
    return sum(
        shard.samples
        for one, own in zip(sets, manifests, strict=True)
        for shard in own.of_split(one.split)
    )


def classes_of(
    recipe: Recipe,
    manifest: Manifest | None,
    given: int | None,
    *,
    label_vectors: np.ndarray | None = None,
    class_ranks: int,
) -> Classes:
    """Return the class counts of a run of the recipe.

    `label_vectors` [K, D] replace those of the shards. Raises ValueError if neither `given` nor the
    recipe nor the shards determine the number of classes.
    """
    known = len(manifest.classes) if manifest is not None else recipe.head.num_classes
    num = given if given is not None else known
    if num is None:
        raise ValueError(
            f"{recipe.data.shards} contains no manifest.json, so the number of classes is unknown: "
            "pass --classes"
        )
    if recipe.head.weights.kind in ("dense", "factored"):
        return Classes(num, num, 1.0, 0, 0, plain=True, exact=True)
    if label_vectors is not None:
        tree = build_tree(recipe.head, num_classes=num, label_vectors=label_vectors)
        return _of_tree(tree, recipe, class_ranks)
    if manifest is not None and num == len(manifest.classes):
        return _of_tree(_tree(recipe, manifest), recipe, class_ranks)
    return _at_most(num, recipe, class_ranks)


def _tree(recipe: Recipe, manifest: Manifest) -> LabelTree:
    return build_tree(
        recipe.head,
        num_classes=len(manifest.classes),
        label_vectors=label_vectors_of(recipe, manifest),
        class_names=manifest.class_names,
        class_paths=class_paths_of(recipe, manifest),
    )


def _of_tree(tree: LabelTree, recipe: Recipe, class_ranks: int) -> Classes:
    if recipe.head.loss.over_nodes:
        nodes = classes_at_leaves(tree).num_nodes  # each node is a column of the logits
        return Classes(tree.num_classes, nodes, 1.0, 0, 0, plain=True, exact=True)
    starts = [shard_range(tree.num_nodes, rank, class_ranks) for rank in range(1, class_ranks)]
    above = [tree.ancestors(start) for start, stop in starts if stop > start]
    boundary = len(np.unique(np.concatenate(above))) if above else 0
    depth = float(tree.depth[tree.node_of_class].mean()) + 1
    inner = int(tree.has_children.sum())
    return Classes(
        tree.num_classes, tree.num_nodes, depth, boundary, inner, plain=not inner, exact=True
    )


def _at_most(num: int, recipe: Recipe, class_ranks: int) -> Classes:
    """Return upper bounds: a balanced binary V-tree, or a U-tree with one node per class."""
    levels = max(1, (num - 1).bit_length())
    if recipe.head.loss.over_nodes:
        return Classes(num, 2 * num - 1, 1.0, 0, 0, plain=True, exact=False)
    nodes = num if recipe.head.weights.kind == "utree" else 2 * num - 1
    boundary = min(nodes, (class_ranks - 1) * levels)
    return Classes(num, nodes, levels + 1.0, boundary, num - 1, plain=False, exact=False)
