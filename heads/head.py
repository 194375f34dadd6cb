"""The class head: class weights x a loss, as one module on top of any features.

`ClassHead(features, labels)` returns the loss of the global batch; `class_rows` hands out the rows
of the classifier for evaluation and export. Training loops, checkpoints and files are not here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from heads.collectives import all_reduce_sum, group_rank, group_size
from heads.dtensors import sharded_rows
from heads.engine import Engine
from heads.init import normal_rows
from heads.labels import class_ids
from heads.losses import ClassFacts, Loss
from heads.norms import squared_norm
from heads.tree import LabelTree
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

    Some losses need more about the classes: `class_counts` [K] are the numbers of training samples,
    `label_vectors` [K, D] the label vectors.

    A row of label j weighs `class_weights[j]` (None: 1), one of label `ignore_index` nothing. With
    `gradient_damping` p the gradient of an inner node of a tree, a sum over the classes below it,
    is divided by their number to the power p.

    A loss that samples classes draws anew in every call with gradients in training mode: `draw`
    counts them, and setting it to where another run stood draws what that one drew.

    With `accumulates` set, gradients of several calls add up on each rank, and `reduce_gradients`
    sums them over the mesh's `data` axis once.

    >>> head = ClassHead(512, 1_000_000, CrossEntropy())
    >>> loss = head(features, labels)   # features [b, 512], labels [b]; the global-mean loss
    >>> loss.backward()
    """

    accumulates = False

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
        class_counts: Tensor | None = None,
        label_vectors: Tensor | None = None,
        ignore_index: int | None = None,
        gradient_damping: float = 0.0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.dim, self.bias, self.mesh = dim, bias, mesh
        self.seed, self.draw = seed, 0
        self.tree = LabelTree.dense(tree) if isinstance(tree, int) else tree
        facts = ClassFacts(self.tree.num_classes, class_counts, label_vectors)
        class_group, data_group = _group(mesh, "class"), _group(mesh, "data")
        weights = ClassWeights(
            self.tree,
            group_rank=group_rank(class_group),
            group_size=group_size(class_group),
            device=torch.device(device),
            damping=gradient_damping,
        )
        self.engine = Engine(
            weights,
            self._prepared(loss, facts).to(torch.device(device)),
            class_group,
            data_group,
            memory_bytes=memory_mib << 20,
            class_weights=_checked_weights(class_weights, self.tree.num_classes, device),
            ignore_index=ignore_index,
        )
        rows = self._initial_rows(seed, init_std)
        self.weight = nn.Parameter(torch.from_numpy(rows).to(device, dtype))

    @property
    def num_classes(self) -> int:
        return self.tree.num_classes

    @property
    def loss(self) -> Loss:
        return self.engine.loss

    # Compiled, it would be compiled anew in every call: dynamo takes `draw` for a constant.
    @torch.compiler.disable
    def forward(
        self, features: Tensor, labels: Tensor, row_weights: Tensor | None = None
    ) -> Tensor:
        """The loss of the global batch, a scalar that is the same on every rank (collective).

        `features` [b, dim] and `labels` [b] are this rank's rows; b may differ over ranks and be 0.
        `row_weights` [b], floats of 0 or more, multiply what each row weighs in the mean; give them
        on every rank or on none.

        Raises, on every rank, ValueError for labels outside the classes or weights that do not fit,
        FloatingPointError where the loss is NaN.
        """
        draw = None
        if self.training and torch.is_grad_enabled():
            draw = ((self.seed << 32) + self.draw) % 2**63
            self.draw += 1
        features = self._with_bias(features)
        return self.engine(
            features,
            labels,
            self.weight,
            row_weights=row_weights,
            draw=draw,
            over_data=not self.accumulates,
        )

    def reduce_gradients(self) -> None:
        """Sum the gradient over the mesh's `data` axis, where `accumulates` has left it unsummed
        (collective)."""
        if self.accumulates and self.weight.grad is not None:
            all_reduce_sum(self.weight.grad, self.engine.data_group)

    def squared_gradient_norm(self) -> Tensor:
        """The squared norm of the gradient of all ranks' rows, a float64 scalar (collective)."""
        grad = self.weight.grad
        squared = squared_norm([] if grad is None else [grad], self.weight.device)
        return all_reduce_sum(squared, self.engine.class_group)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradient by a scalar, the same on every rank."""
        if self.weight.grad is not None:
            self.weight.grad *= factor

    def tree_digest(self) -> str:
        """Tells the label tree from any other, whose rows would mean other classes."""
        return self.tree.digest()

    def row_weights(self, labels: Tensor, factors: Tensor | None = None) -> Tensor:
        """What each row weighs in the mean [b], `factors` being the `row_weights` of `forward`."""
        return self.engine.row_weights(class_ids(labels), factors)

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
        return sharded_rows(rows, self.mesh["class"], shape)

    def _apply(self, fn: Any, recurse: bool = True) -> "ClassHead":
        """What `Module.to` and its like do: the plan and the constants follow the weight."""
        super()._apply(fn, recurse)
        device = self.weight.device
        if device != self.engine.weights.device and device.type != "meta":
            self.engine = self.engine.to(device)
        return self

    def _with_bias(self, features: Tensor) -> Tensor:
        # What is no [b, dim] is refused in the engine, where all ranks hear of it.
        if not self.bias or features.dim() != 2:
            return features
        return torch.cat([features, features.new_ones(len(features), 1)], dim=1)

    def _prepared(self, loss: Loss, facts: ClassFacts) -> Loss:
        return loss.prepare(facts)

    def _initial_rows(self, seed: int, std: float) -> np.ndarray:
        return self.rows_at_start(self.engine.weights, seed=seed, std=std)

    def rows_at_start(
        self, weights: ClassWeights, *, seed: int, std: float, first_class: int = 0
    ) -> np.ndarray:
        """The rows [n, dim (+ 1)] that `weights` begins with; zero but for the classes from
        `first_class` on, if that is not 0."""
        tree, nodes = weights.tree, np.arange(weights.start, weights.stop)
        classes = tree.class_of_node[nodes]
        begins = classes >= first_class
        leaves = np.flatnonzero(begins & ~tree.has_children[nodes])
        rows = np.zeros((len(nodes), self.dim + self.bias), dtype=np.float32)
        rows[leaves, : self.dim] = normal_rows(classes[leaves], self.dim, seed=seed, std=std)
        if self.bias:
            # On the roots, so that every class has it once.
            roots = (tree.parent[nodes] < 0) & (begins | (first_class == 0))
            rows[roots, self.dim] = self.loss.initial_bias(tree.num_classes)
        return rows


def _checked_weights(
    weights: Tensor | None, num_classes: int, device: torch.device | str
) -> Tensor | None:
    if weights is None:
        return None
    weights = torch.as_tensor(weights)
    fits = weights.shape == (num_classes,) and weights.isfinite().all() and (weights >= 0).all()
    if not fits or not weights.any():
        raise ValueError(
            f"class weights have shape {list(weights.shape)}: give {num_classes} finite numbers "
            "that are not negative, one a class, and not all of them zero"
        )
    return weights.to(device)


def _group(mesh: DeviceMesh | None, axis: str) -> ProcessGroup | None:
    return None if mesh is None else mesh.get_group(axis)
