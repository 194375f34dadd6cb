"""The class head: class weights x a loss, as one module on top of any features.

`ClassHead(features, labels)` returns the loss of the global batch; `class_rows` hands out the rows
of the classifier for evaluation and export. Training loops, checkpoints and files are not here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from heads.collectives import group_rank, group_size
from heads.config import HeadConfig, LabelTreeConfig
from heads.engine import Engine
from heads.init import normal_rows
from heads.losses import Loss, build_loss
from heads.tree import CoverTree, LabelTree, build_cover_tree
from heads.tree.named_tree import NamedTree
from heads.weights import ClassWeights


@dataclass(frozen=True)
class ClassRows:
    """Rows of some classes: `class_ids` [C] and `rows` [C, dim (+ 1, the bias)]."""

    class_ids: Tensor
    rows: Tensor


@dataclass(frozen=True)
class ClassScores:
    """Scores of some classes: `class_ids` [C] and `scores` [b, C]."""

    class_ids: Tensor
    scores: Tensor


class ClassHead(nn.Module):
    """Class weights x a loss over `num_classes` classes, sharded over a mesh's `class` axis.

    `tree` is a number of classes (dense weights) or a `LabelTree`. `mesh` is a 2-D `DeviceMesh`
    with axes `data` and `class`; None is one process. Every rank holds `weight`, its contiguous
    rows of the node matrix. Leaves start normal with `init_std`, keyed by (seed, class); inner
    nodes at zero, biases where the loss wants them.

    A row of label j weighs `class_weights[j]` (None: 1), one of label `ignore_index` nothing.

    >>> head = ClassHead(512, 1_000_000, CrossEntropy())
    >>> loss = head(features, labels)   # features [b, 512], labels [b]; the global-mean loss
    >>> loss.backward()
    """

    def __init__(
        self,
        dim: int,
        tree: LabelTree | int,
        loss: Loss,
        *,
        bias: bool = True,
        mesh: DeviceMesh | None = None,
        seed: int = 0,
        init_std: float = 0.01,
        memory_mib: int = 256,
        class_weights: Tensor | None = None,
        ignore_index: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.dim, self.bias, self.loss, self.mesh = dim, bias, loss, mesh
        self.tree = LabelTree.dense(tree) if isinstance(tree, int) else tree
        class_group, data_group = _group(mesh, "class"), _group(mesh, "data")
        weights = ClassWeights(
            self.tree,
            group_rank=group_rank(class_group),
            group_size=group_size(class_group),
            device=torch.device(device),
        )
        self.engine = Engine(
            weights,
            loss,
            class_group,
            data_group,
            memory_bytes=memory_mib << 20,
            class_weights=_checked_weights(class_weights, self.num_classes, device),
            ignore_index=ignore_index,
        )
        rows = self._initial_rows(seed, init_std)
        self.weight = nn.Parameter(torch.from_numpy(rows).to(device, dtype))

    @property
    def num_classes(self) -> int:
        return self.tree.num_classes

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """The loss of the global batch, a scalar that is the same on every rank (collective).

        `features` [b, dim] and `labels` [b] are this rank's rows; b may differ over ranks and be 0.

        Raises ValueError, on every rank, for labels outside the classes.
        """
        return self.engine(self._with_bias(features), labels, self.weight)

    def row_weights(self, labels: Tensor) -> Tensor:
        """What each row weighs in the mean [b]."""
        return self.engine.row_weights(labels)

    def logits(self, features: Tensor, rows: Tensor) -> Tensor:
        """[b, dim] x [C, dim (+ 1)] -> [b, C], in the rows' precision."""
        return self._with_bias(features).to(rows.dtype) @ rows.T

    def score_blocks(self, features: Tensor, classes_at_once: int = 4096) -> Iterator[ClassScores]:
        """Scores [b, C] of `features` [b, dim] for this rank's classes, in blocks (collective when
        it starts); over the ranks of the `class` axis every class comes exactly once."""
        for block in self.class_rows(classes_at_once):
            scores = self.loss.score(self.logits(features, block.rows))
            yield ClassScores(block.class_ids, scores)

    def class_rows(self, classes_at_once: int = 4096) -> Iterator[ClassRows]:
        """This rank's rows of the classifier, in blocks of node order (collective when it starts).

        Over the ranks of the `class` axis every class comes exactly once.
        """
        weights, held = self.engine.weights, self.weight.detach()
        boundary = weights.fetch_boundary(held, self.engine.class_group)
        for block in weights.blocks(classes_at_once):
            yield ClassRows(block.class_ids, weights.rows(block, held, boundary))

    def sharded(self, rows: Tensor) -> Tensor:
        """A tensor laid out as this rank's `weight` (or an optimizer's moment of it), as the
        `Shard(0)` DTensor that a checkpoint reshards; unchanged in one process."""
        if self.mesh is None:
            return rows
        shape = torch.Size((self.tree.num_nodes, *rows.shape[1:]))
        # Shape and stride are given: from uneven shards alone they are inferred wrongly.
        return DTensor.from_local(
            rows,
            self.mesh["class"],
            [Shard(0)],
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )

    def _with_bias(self, features: Tensor) -> Tensor:
        if not self.bias:
            return features
        return torch.cat([features, features.new_ones(len(features), 1)], dim=1)

    def _initial_rows(self, seed: int, std: float) -> np.ndarray:
        weights, tree = self.engine.weights, self.tree
        nodes = np.arange(weights.start, weights.stop)
        leaves = np.flatnonzero((tree.class_of_node[nodes] >= 0) & ~tree.has_children[nodes])
        rows = np.zeros((len(nodes), self.dim + self.bias), dtype=np.float32)
        class_ids = tree.class_of_node[nodes[leaves]]
        rows[leaves, : self.dim] = normal_rows(class_ids, self.dim, seed=seed, std=std)
        if self.bias:
            # On the roots, so that every class has it once.
            rows[tree.parent[nodes] < 0, self.dim] = self.loss.initial_bias(self.num_classes)
        return rows


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
    class_names: Sequence[str] | None = None,
) -> ClassHead:
    """The head of a recipe; trees are built from `label_vectors` [K, D] by every rank alike.

    `class_counts` [K] are the training samples of each class, for what depends on frequency.

    Raises ValueError where `config.num_classes` or the label vectors do not fit `num_classes`.
    """
    if config.num_classes not in (None, num_classes):
        raise ValueError(
            f"head.num_classes is {config.num_classes} and the shards have {num_classes} classes: "
            "correct it, leave it out, or point data.shards at the other shards"
        )
    return ClassHead(
        dim,
        build_tree(
            config,
            num_classes=num_classes,
            label_vectors=label_vectors,
            class_names=class_names,
        ),
        build_loss(
            config.loss,
            num_classes=num_classes,
            label_vectors=label_vectors,
            class_counts=class_counts,
            device=device,
        ),
        bias=config.bias,
        mesh=mesh,
        seed=seed,
        init_std=config.init_std,
        memory_mib=config.memory_mib,
        class_weights=_class_weights(config.class_weights, num_classes, class_counts),
        device=device,
    )


def build_tree(
    config: HeadConfig,
    *,
    num_classes: int,
    label_vectors: np.ndarray | None,
    class_names: Sequence[str] | None = None,
) -> LabelTree:
    """The label tree behind a recipe's class weights, from `label_vectors` [K, D] or a file.

    The classes of a file are matched by name where `class_names` [K] are given, else by number.
    Raises ValueError where vectors are missing, or a tree has other classes or another kind.
    """
    weights = config.weights
    if weights.kind == "dense":
        return LabelTree.dense(num_classes)
    if weights.tree.file is not None:
        return _tree_from_file(weights.tree.file, weights.kind, num_classes, class_names)
    cover = _cover_tree(weights.tree, num_classes, label_vectors)
    return cover.utree() if weights.kind == "utree" else cover.vtree()


def _tree_from_file(
    path: Path,
    kind: Literal["utree", "vtree"],
    num_classes: int,
    class_names: Sequence[str] | None,
) -> LabelTree:
    named = NamedTree.load(path)
    if len(named.classes) != num_classes:
        raise ValueError(
            f"tree {path} has {len(named.classes)} classes and the data {num_classes}: "
            "build it from the data's class list"
        )
    tree = named.tree if class_names is None else named.for_classes(class_names)
    every_node_a_class = tree.num_nodes == tree.num_classes
    classes_are_leaves = not tree.has_children[tree.node_of_class].any()
    if not (every_node_a_class if kind == "utree" else classes_are_leaves):
        other = "vtree" if kind == "utree" else "utree"
        raise ValueError(
            f"tree {path} is no {kind}: choose head.weights.kind={other}, "
            f"or build it with kway tree build --kind {kind}"
        )
    return tree


def _cover_tree(
    config: LabelTreeConfig, num_classes: int, label_vectors: np.ndarray | None
) -> CoverTree:
    if label_vectors is None:
        raise ValueError(
            "head.weights needs label vectors and the shards carry none: choose "
            "head.weights.kind=dense or head.weights.tree.file, or shards with label vectors"
        )
    if len(label_vectors) != num_classes:
        raise ValueError(
            f"there are {len(label_vectors)} label vectors and {num_classes} classes: "
            "shard the data again"
        )
    return build_cover_tree(label_vectors, base=config.base)


def _class_weights(
    kind: Literal["none", "balanced"], num_classes: int, class_counts: np.ndarray | None
) -> Tensor | None:
    """Balanced: N / (K n_j), so that every class weighs the same; a class without samples 0."""
    if kind == "none":
        return None
    if class_counts is None:
        raise ValueError("head.class_weights balanced needs the training samples of each class")
    counts = torch.from_numpy(class_counts).to(torch.float32)
    weights = counts.sum() / (num_classes * counts)
    return torch.where(counts > 0, weights, 0)


def _checked_weights(
    weights: Tensor | None, num_classes: int, device: torch.device | str
) -> Tensor | None:
    if weights is None:
        return None
    if weights.shape != (num_classes,) or not (weights.isfinite() & (weights >= 0)).all():
        raise ValueError(
            f"class weights have shape {list(weights.shape)}: give {num_classes} finite numbers "
            "that are not negative, one a class"
        )
    return weights.to(device)


def _group(mesh: DeviceMesh | None, axis: str) -> ProcessGroup | None:
    return None if mesh is None else mesh.get_group(axis)
