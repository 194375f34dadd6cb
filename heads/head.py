"""The class head: class weights, a logit map and a loss in one module on top of any features.

Calling a `ClassHead` with features and labels returns the loss of the global batch; `class_rows`
yields the rows of the classifier for evaluation and export.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from heads.collectives import all_reduce_sum, axis_group, group_rank, group_size
from heads.dtensors import sharded_rows
from heads.engine.agreement import agree, nan_loss
from heads.engine.block_size import Processor
from heads.engine.constants import Engine
from heads.engine.engine import Step
from heads.engine.inputs import (
    LARGEST_WEIGHT,
    Batch,
    Parameters,
    check_label_sets,
    loss_weights,
)
from heads.gradients import squared_norm
from heads.label_sets import LabelSets, class_ids_of
from heads.logit_maps import ClassRows, Dot, LogitMap, log_prior
from heads.losses import ClassFacts, Loss
from heads.rows.initial_rows import initial_bias, initial_rows
from heads.rows.node_values import FP8, NodeValues, wide_dtype
from heads.rows.row_update import RowUpdate
from heads.tiles.launch import check_tiles
from heads.tree import LabelTree
from heads.weights import ClassWeights

# The magnitude of logits for which the rate of a learned scale is suitable; see `sgd_rates`.
_LOGIT_MAGNITUDE = 32.0
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, FP8)


@dataclass(frozen=True)
class ClassScores:
    """Scores of some classes: `class_ids` [C] and `scores` [b, C]."""

    class_ids: Tensor
    scores: Tensor


class ClassHead(nn.Module):
    """Class weights, a logit map and a loss, sharded over a mesh's `class` axis.

    `tree` is a number of classes (dense weights) or a `LabelTree`. `mesh` is a 2-D `DeviceMesh`
    with axes `data` and `class`; None means a single process. Every rank holds `weight`, its
    contiguous rows [n, dim] of the node matrix, and `bias`, the entries [n] of these nodes. `bias`
    is None if the head has no bias; by default, it has one if the logit map supports it.

    The vectors of leaves are drawn from a normal distribution with standard deviation `init_std`,
    as a function of (seed, class); inner nodes start at zero. The bias starts at the loss's initial
    value at the roots and at zero elsewhere, so that the bias of every class contains that value
    exactly once. If `logits` learns its scale or offset, they are the scalar parameters `log_scale`
    and `offset`, replicated on every rank.

    Some losses need information about the classes: `class_counts` [K], the number of training
    samples per class, or `label_vectors` [K, D].

    A row with label j has the weight `class_weights[j]` (None: 1). With label sets, the class
    weights multiply the terms of the labels (`Rows`). The gradient of an inner node of a tree is a
    sum over the classes below it. With `gradient_damping` p, the sum is divided by the number of
    these classes to the power p.

    In training mode with gradients enabled, a loss that samples classes draws new ones in every
    call. `draw` counts these calls. A resumed run that restores `draw` draws the same classes as an
    uninterrupted run.

    `dtype` is the dtype of the class rows: float32, float64, bf16, or fp8 (`torch.float8_e4m3fn`),
    which needs `FusedSGD`. fp8 rows have the buffer `row_scales` [n], bf16 powers of two by which
    they are multiplied. All other parameters are float32 or float64.

    With `tiles`, Triton kernels compute the statistics and gradients of the logits without writing
    the logits to memory. Raises ValueError if the loss, the device or `dtype` does not support it.

    If `accumulates` is set, the gradients of several calls are accumulated on each rank, and one
    call to `reduce_gradients` sums them over the mesh's `data` axis.

    >>> head = ClassHead(512, 1_000_000, CrossEntropy())
    >>> loss = head(features, labels)   # features [b, 512], labels [b]; mean over the global batch
    >>> loss.backward()
    """

    accumulates = False
    # Replaces the gradient of `weight`; set by `FusedSGD`.
    row_update: RowUpdate | None = None
    supports_row_update: ClassVar[bool] = True
    row_scales: Tensor | None

    def __init__(
        self,
        dim: int,
        tree: LabelTree | int,
        loss: Loss,
        *,
        logits: LogitMap | None = None,
        bias: bool | None = None,
        mesh: DeviceMesh | None = None,
        seed: int = 0,
        init_std: float = 0.01,
        memory_mib: int | None = None,
        class_weights: Tensor | None = None,
        class_counts: Tensor | None = None,
        label_vectors: Tensor | None = None,
        gradient_damping: float = 0.0,
        tiles: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if tiles:
            check_tiles(loss, torch.device(device), dtype)
        if dtype not in _DTYPES:
            names = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
            raise ValueError(f"class rows cannot have dtype {dtype}: use one of {names}")
        wide = wide_dtype(dtype)
        self.dim, self.mesh = dim, mesh
        self.seed, self.draw = seed, 0
        self.tree = LabelTree.dense(tree) if isinstance(tree, int) else tree
        facts = ClassFacts(self.tree.num_classes, class_counts, label_vectors)
        class_group, data_group = axis_group(mesh, "class"), axis_group(mesh, "data")
        self.logit_map = logits = logits or Dot()
        if bias and logits.normalizes:
            raise ValueError(
                f"{logits.kind} logits do not support a bias: pass bias=False, or set learn_offset"
            )
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
            logits,
            Processor.of(torch.device(device)),
            memory_bytes=None if memory_mib is None else memory_mib << 20,
            log_prior=self._log_prior(class_counts, device, wide),
            class_weights=_checked_weights(class_weights, self.tree.num_classes, device),
            tiles=tiles,
        )
        rows = initial_rows(weights, dim, seed=seed, std=init_std, dtype=dtype)
        self.weight = nn.Parameter(rows.held)
        self.register_buffer("row_scales", rows.scales)
        entries = initial_bias(weights, self.loss).to(wide)
        has_bias = not logits.normalizes if bias is None else bias
        self.bias = nn.Parameter(entries) if has_bias else None
        log_scale = torch.tensor(math.log(logits.scale), device=device, dtype=wide)
        self.log_scale = nn.Parameter(log_scale) if logits.learn_scale else None
        offset = torch.tensor(logits.offset, device=device, dtype=wide)
        self.offset = nn.Parameter(offset) if logits.learn_offset else None

    @property
    def num_classes(self) -> int:
        return self.class_tree.num_classes

    @property
    def class_tree(self) -> LabelTree:
        """The tree with the classes of the labels. Its nodes are sharded like those of `tree`."""
        return self.tree

    @property
    def loss(self) -> Loss:
        return self.engine.loss

    # Dynamo treats `draw` as a constant, so a compiled forward would be recompiled on every call.
    @torch.compiler.disable
    def forward(
        self,
        features: Tensor,
        labels: Tensor | LabelSets,
        row_weights: Tensor | None = None,
        *,
        rows_of_ranks: Sequence[int] | None = None,
        labels_of_ranks: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the loss of the global batch, a scalar that is the same on every rank
        (collective).

        `features` [b, dim] and `labels` [b] are this rank's rows; b may differ across ranks and may
        be 0. If rows have several labels or none, `labels` are `LabelSets` of b rows, on every
        rank. `row_weights` [b], floats of at least 0, multiply the weight of each row in the mean.
        Pass them on every rank or on none. In training mode, logits include the margin and the
        prior of the logit map.

        Raises ValueError on every rank for labels outside the classes or invalid row weights, and
        FloatingPointError on every rank if the loss is NaN.

        These checks make the host wait for the device. A training loop that must not wait passes
        `rows_of_ranks`, the number of rows on each rank, in the order of the mesh, and with label
        sets on several ranks `labels_of_ranks`, the number of labels on each rank. The caller must
        then check the labels and row weights, for example with `check`, and every rank must require
        the same gradients. A NaN loss is returned and does not raise an error; call `nan_error`
        later to describe it. If the rows or labels of a rank are not as many as listed, it shows a
        RuntimeWarning and the loss is NaN on every rank. Lists that differ between ranks cannot be
        detected: the ranks hang or abort in a collective.
        """
        draw = None
        if self.training and torch.is_grad_enabled():
            draw = ((self.seed << 32) + self.draw) % 2**63
            self.draw += 1
        step = Step(
            self.engine,
            Batch(features, self._node_labels(labels), row_weights),
            self._learned(),
            training=self.training,
            draw=draw,
            over_data=not self.accumulates,
            rows_of_ranks=rows_of_ranks,
            labels_of_ranks=labels_of_ranks,
            update=self.row_update,
        )
        return step.loss()

    def check_label_sets(self) -> None:
        """Raise ValueError if the loss or the class weights do not support label sets."""
        check_label_sets(self.loss, self.engine.class_weights)

    def check(
        self, features: Tensor, labels: Tensor | LabelSets, row_weights: Tensor | None = None
    ) -> None:
        """Check a batch without computing its loss (collective). Raises the same ValueErrors as
        `forward`."""
        batch = Batch(features, self._node_labels(labels), row_weights)
        agree(self.engine, batch, self._learned())

    def nan_error(self, num_rows: int, broken_rows: Tensor) -> FloatingPointError:
        """Return the error that `forward` raises for a NaN loss, the same on every rank
        (collective).

        `broken_rows` are the `non_finite_rows` of the features [num_rows, dim] of this rank.
        """
        return nan_loss(self.engine, num_rows, broken_rows, self._learned())

    def sgd_rates(self) -> dict[str, float]:
        """Return the factor of the learning rate with which SGD trains each parameter: 1, except
        for `log_scale` and `offset`.

        The gradient of the logarithm of the scale is about as large as the logits, and a step
        changes the logits in proportion to their size. Without a factor, one step of a rate that
        suits the class rows can multiply the scale by e^10. The offset is a term of K logits, so
        its gradient is the sum of those of K biases; divided by K, it moves like their mean. The
        steps of Adam do not depend on the size of a gradient and need no factor.
        """
        factors = {
            "log_scale": max(self.logit_map.scale, _LOGIT_MAGNITUDE) ** -2,
            "offset": 1 / self.num_classes,
        }
        return {name: factors.get(name, 1.0) for name, _ in self.named_parameters()}

    def reduce_gradients(self) -> None:
        """Sum the gradients over the mesh's `data` axis if `accumulates` is set (collective)."""
        if self.accumulates:
            for grad in self._gradients():
                all_reduce_sum(grad, self.engine.data_group)

    def squared_gradient_norm(self) -> Tensor:
        """Return the squared norm of the gradient over all ranks, a float64 scalar (collective)."""
        held = squared_norm(self._gradients(replicated=False), self.weight.device)
        if self.row_update is not None and self.row_update.squared_norm is not None:
            held += self.row_update.squared_norm
        replicated = squared_norm(self._gradients(held=False), self.weight.device)
        return all_reduce_sum(held, self.engine.class_group) + replicated

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients by `factor`, the same scalar on every rank."""
        for grad in self._gradients():
            grad *= factor
        if self.row_update is not None:
            self.row_update.scale(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and forget a deferred update of the class rows."""
        super().zero_grad(set_to_none)
        if self.row_update is not None:
            self.row_update.clear()

    def tree_digest(self) -> str:
        """Return a digest of the label tree, which determines the class of each row."""
        return self.tree.digest()

    @property
    def has_uniform_rows(self) -> bool:
        """Whether every row has the weight 1 before a call's `row_weights` are applied. Rows with
        label sets may have other weights."""
        return self.engine.class_weights is None

    def row_weights(self, labels: Tensor | LabelSets, factors: Tensor | None = None) -> Tensor:
        """Return the weight [b] of each row in the mean; `factors` are the caller's row weights."""
        labels = labels.long()
        weights = loss_weights(self.loss, self.engine.class_weights, labels, factors)
        sets = labels if isinstance(labels, LabelSets) else None
        of_labels = sets is not None and self.loss.label_sets == "labels"
        if weights is None:
            num = len(class_ids_of(labels) if of_labels else labels)
            weights = class_ids_of(labels).new_ones(num, dtype=torch.float32)
        if sets is None or not of_labels:
            return weights
        return sets.sums(weights) / sets.sizes.clamp(min=1)

    def logits(self, features: Tensor, classes: ClassRows) -> Tensor:
        """Return the logits [b, C] of `classes` for `features` [b, dim], in the dtype of the rows
        and without the training-only margin and prior."""
        return self.evaluated_map()(features, classes)

    def evaluated_map(self) -> LogitMap:
        """Return the logit map for evaluation and serving, with the current scale and offset."""
        scale, offset = self.logit_map.scale, self.logit_map.offset
        if self.log_scale is not None:
            scale = self.log_scale.exp().item()
        if self.offset is not None:
            offset = self.offset.item()
        return self.logit_map.evaluated(scale=scale, offset=offset)

    def score_blocks(self, features: Tensor, classes_at_once: int = 4096) -> Iterator[ClassScores]:
        """Yield scores [b, C] of `features` [b, dim] for this rank's classes, in blocks.

        Computing the first block is a collective. Across the ranks of the `class` axis, every class
        occurs exactly once.
        """
        logit_map = self.evaluated_map()
        for block in self.class_rows(classes_at_once):
            scores = self.loss.score(logit_map(features, block))
            yield ClassScores(block.class_ids, scores)

    def class_rows(self, classes_at_once: int = 4096) -> Iterator[ClassRows]:
        """Yield this rank's rows of the classifier in node order, block by block, in float32 or
        float64.

        Computing the first block is a collective. Across the ranks of the `class` axis, every class
        occurs exactly once.
        """
        weights, group = self.engine.weights, self.engine.class_group
        rows, bias = weights.with_boundary(self.node_values(), group), None
        wide = wide_dtype(self.weight.dtype)
        if self.bias is not None:
            bias = weights.with_boundary(NodeValues(self.bias.detach().unsqueeze(1)), group)
        for block in weights.blocks(classes_at_once):
            entries = None if bias is None else weights.rows(block, bias).squeeze(1)
            yield ClassRows(block.class_ids, weights.rows(block, rows).to(wide), entries)

    def node_values(self) -> NodeValues:
        """Return the vectors of this rank's nodes, which share memory with `weight`."""
        return NodeValues(self.weight.detach(), self.row_scales)

    def sharded(self, rows: Tensor) -> Tensor:
        """Wrap a tensor with the layout of this rank's `weight` or `bias`, such as an optimizer
        moment, in a `Shard(0)` DTensor, which a checkpoint can reshard.

        Scalars are returned unchanged, as are all tensors in a single process.
        """
        if self.mesh is None or not rows.ndim:
            return rows
        shape = torch.Size((self.tree.num_nodes, *rows.shape[1:]))
        return sharded_rows(rows, self.mesh["class"], shape)

    def _apply(self, fn: Any, recurse: bool = True) -> "ClassHead":
        """Also move the engine's plan and constants. `Module.to` and similar methods call this."""
        super()._apply(fn, recurse)
        device, scales = self.weight.device, self.row_scales
        if scales is not None and self.weight.dtype != FP8:
            self.weight.data.mul_(scales.to(self.weight.dtype).unsqueeze(1))
            self.row_scales = None
        elif scales is not None:
            self.row_scales = scales.to(torch.bfloat16)
        if device != self.engine.weights.device and device.type != "meta":
            self.engine = self.engine.to(device)
        return self

    def _learned(self) -> Parameters:
        return Parameters(self.weight, self.bias, self.log_scale, self.offset, self.row_scales)

    def _gradients(self, *, held: bool = True, replicated: bool = True) -> list[Tensor]:
        """Return the existing gradients of the sharded parameters and of the replicated scalars."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        return [grad for grad in grads if (held if grad.ndim else replicated)]

    def _log_prior(
        self,
        class_counts: Tensor | None,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> Tensor | None:
        tau = self.logit_map.prior
        if not tau:
            return None
        if class_counts is None:
            raise ValueError(
                f"the prior of {self.logit_map.kind} logits needs the number of training samples "
                "per class: pass class_counts"
            )
        counts = torch.as_tensor(class_counts)
        if counts.shape != (self.num_classes,) or not (counts >= 0).all():
            raise ValueError(
                f"class_counts of shape {list(counts.shape)} are not valid: pass "
                f"{self.num_classes} numbers of at least 0"
            )
        return log_prior(tau, counts).to(device, dtype)

    def _prepared(self, loss: Loss, facts: ClassFacts) -> Loss:
        return loss.prepare(facts)

    def _node_labels(self, labels: Tensor | LabelSets) -> Tensor | LabelSets:
        """Return the labels for the engine, which are nodes if its columns are the nodes of a tree
        (`HierarchicalSoftmaxHead`)."""
        return labels


def _checked_weights(
    weights: Tensor | None, num_classes: int, device: torch.device | str
) -> Tensor | None:
    if weights is None:
        return None
    weights = torch.as_tensor(weights)
    # Outside this range, sums and products of weights could overflow or vanish in float32.
    lowest = 1 / LARGEST_WEIGHT
    valid = (weights == 0) | ((weights >= lowest) & (weights <= LARGEST_WEIGHT))
    if weights.shape != (num_classes,) or not valid.all() or not weights.any():
        raise ValueError(
            f"class_weights of shape {list(weights.shape)} are not valid: pass {num_classes} "
            f"numbers that are 0 or between {lowest:g} and {LARGEST_WEIGHT:g}, with at least one "
            "above 0"
        )
    return weights.to(device)
