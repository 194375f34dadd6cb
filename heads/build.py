"""Build a head, with its label tree and class weights, from the `head` section of a recipe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from heads.config import HeadConfig
from heads.factored import FactoredHead
from heads.head import ClassHead
from heads.hierarchical import HierarchicalSoftmaxHead
from heads.rows.node_values import FP8
from heads.tree import LabelTree, build_cover_tree, label_tree_of_paths
from heads.tree.named_tree import Positions, load_tree

ClassPaths = tuple[Sequence[Sequence[str]], np.ndarray]
"""The names above the classes, from the root down: class i is below `paths[path_of_class[i]]`."""

ROW_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8}


def build_head(
    config: HeadConfig,
    *,
    dim: int,
    num_classes: int,
    label_vectors: np.ndarray | None,
    mesh: DeviceMesh | None,
    seed: int,
    device: torch.device | str,
    class_counts: np.ndarray | None = None,
    tree_positions: Positions | None = None,
    class_paths: ClassPaths | None = None,
    tree: LabelTree | None = None,
) -> ClassHead:
    """Build the head of a recipe.

    Every rank builds the same label tree, from `label_vectors` [K, D] or from `class_paths`,
    unless `tree` is given.
    `class_counts` [K] is the number of training samples per class. Balanced class weights, priors
    and the noise distribution of nce require it.

    Raises ValueError if `config.num_classes` or the label vectors do not match `num_classes`.
    """
    if config.num_classes not in (None, num_classes):
        raise ValueError(
            f"head.num_classes is {config.num_classes}, but the shards have {num_classes} classes: "
            "correct or remove head.num_classes, or set data.shards to the intended shards"
        )
    if tree is None:
        tree = build_tree(
            config,
            num_classes=num_classes,
            label_vectors=label_vectors,
            tree_positions=tree_positions,
            class_paths=class_paths,
        )
    weights = _class_weights(config.class_weights, num_classes, class_counts)
    options: dict[str, Any] = {
        "mesh": mesh,
        "seed": seed,
        "init_std": config.init_std,
        "memory_mib": config.memory_mib,
        "device": device,
    }
    if config.loss.over_nodes:
        return HierarchicalSoftmaxHead(dim, tree, bias=config.bias, **options)
    options["class_weights"] = weights
    if config.weights.kind == "factored":
        return FactoredHead(dim, num_classes, config.loss, **options)
    return ClassHead(
        dim,
        tree,
        config.loss,
        logits=config.logits,
        bias=config.bias,
        class_counts=_tensor(class_counts),
        label_vectors=_tensor(label_vectors),
        tiles=config.tiles,
        dtype=ROW_DTYPES[config.dtype],
        gradient_damping=0.0 if config.weights.kind == "dense" else config.weights.gradient_damping,
        **options,
    )


def _tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)


def build_tree(
    config: HeadConfig,
    *,
    num_classes: int,
    label_vectors: np.ndarray | None,
    tree_positions: Positions | None = None,
    class_paths: ClassPaths | None = None,
) -> LabelTree:
    """Build or load the label tree for a recipe's class weights.

    The source is `label_vectors` [K, D], `class_paths` or a file. The classes in a file are
    matched by name if `tree_positions` is given, otherwise by number; see `load_tree`. Raises
    ValueError if the vectors or paths are missing, or if the tree in the file has different classes
    or is of a different kind.
    """
    weights = config.weights
    if weights.kind == "dense" or weights.kind == "factored":
        return LabelTree.dense(num_classes)
    if weights.tree.file is not None:
        tree = load_tree(weights.tree.file, num_classes, tree_positions)
        _check_kind(tree, weights.kind, weights.tree.file)
        return tree
    if weights.tree.kind == "hierarchy":
        if class_paths is None:
            raise ValueError(
                "head.weights.tree.kind=hierarchy needs class paths, but the shards have none: set "
                "head.weights.tree.kind=vectors or head.weights.tree.file"
            )
        return label_tree_of_paths(*class_paths)[0]
    if label_vectors is None:
        raise ValueError(
            "head.weights needs label vectors, but the shards have none: use shards with label "
            "vectors, or set head.weights.kind=dense, head.weights.tree.file or, if the shards "
            "have a hierarchy, head.weights.tree.kind=hierarchy"
        )
    if len(label_vectors) != num_classes:
        raise ValueError(
            f"there are {len(label_vectors)} label vectors, but {num_classes} classes: "
            "write the shards again with kway shard"
        )
    cover = build_cover_tree(label_vectors, base=weights.tree.base)
    return cover.utree() if weights.kind == "utree" else cover.vtree()


def _check_kind(tree: LabelTree, kind: Literal["utree", "vtree"], path: Path) -> None:
    every_node_a_class = tree.num_nodes == tree.num_classes
    classes_are_leaves = not tree.has_children[tree.node_of_class].any()
    if not (every_node_a_class if kind == "utree" else classes_are_leaves):
        other = "vtree" if kind == "utree" else "utree"
        raise ValueError(
            f"tree {path} is not a {kind}: set head.weights.kind={other}, "
            f"or build it with kway tree build --kind {kind}"
        )


def _class_weights(
    kind: Literal["none", "balanced"], num_classes: int, class_counts: np.ndarray | None
) -> Tensor | None:
    """Return the class weights [K], or None if they are uniform.

    Balanced weights are N / (K n_j), so that every class has the same total weight. The weight of a
    class without samples is 0.
    """
    if kind == "none":
        return None
    if class_counts is None:
        raise ValueError(
            "head.class_weights=balanced needs the number of training samples per class: pass "
            "class_counts"
        )
    counts = torch.from_numpy(class_counts).to(torch.float32)
    weights = counts.sum() / (num_classes * counts)
    return torch.where(counts > 0, weights, 0)
