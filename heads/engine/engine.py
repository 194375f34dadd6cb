"""The exact, memory-bounded, class-sharded loss of a head: one autograd Function for all losses.

A loss is a function of a few numbers per row of the batch, called statistics. The statistics of
disjoint blocks of classes can be merged (`heads/losses/base.py`), so the logits of all classes are
never needed at once.

Forward
  1. All-gather features and labels over the class group: every rank computes the logits of its own
     classes for the same G rows.
  2. Iterate over this rank's classes in blocks (`heads/engine/torch_walk.py`): class rows, logits
     [G, C], statistics. Keep the statistics and, as far as memory permits, the logits of the first
     blocks.
  3. Merge the statistics over blocks, exchange and merge them over the class group, concatenate
     them over the data group, and compute the value.

Backward
  1. Compute the gradient [G, ...] of the value with respect to the statistics of each block.
  2. Iterate over the blocks again. For each block, convert the gradient of its statistics to the
     gradient of its logits. From that, two matrix products compute the gradient of its class rows
     and its term of the gradient of the features, which is a sum over all classes.
  3. Sum over ranks: the terms of the feature gradients over the class group, the gradients of tree
     nodes over their subtrees, and the gradients of all parameters over the data group.

For example, the statistics of cross-entropy are (logsumexp z, z_y). This table shows a row with
logits 1, 2, 0, 3 and label 1, in two blocks of two classes:

    block     statistics   their gradient     gradient of the logits
    1, 2      2.313, 2     0.324, -1          0.324 softmax(1, 2) + (0, -1) = 0.087, -0.763
    0, 3      3.049, 0     0.676, -1          0.676 softmax(0, 3)           = 0.032,  0.644
    merged    3.440, 2     value 3.440 - 2 = 1.440

The last column is softmax(z) - onehot(y), computed without a tensor of all logits.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import (
    all_gather_equal,
    all_gather_rows,
    all_reduce_sum,
    group_rank,
    reduce_scatter_rows,
)
from heads.engine.agreement import agree, known_rows, nan_loss, non_finite_rows
from heads.engine.blockwise import BlockwiseLogits, GradientSums, HeldGradient
from heads.engine.constants import Engine
from heads.engine.inputs import Batch, Parameters, Required, loss_weights
from heads.engine.torch_walk import TorchWalk
from heads.label_sets import LabelSets, all_gather_labels, class_ids_of
from heads.logit_maps import Margins
from heads.losses import Rows, Stats
from heads.rows.node_values import NodeValues
from heads.rows.row_update import RowStep, RowUpdate
from heads.tiles.launch import check_tiles
from heads.tiles.walk import TileWalk

# Shape legend: b rows of this rank, G rows of the class group, m rows of the global batch, d
# features.


class Step:
    """One computation of the loss of the global batch, and of its gradients.

    `batch` contains this rank's rows; their number may differ across ranks and may be 0. If
    `training` is true, logits include the margin and the prior of the logit map. `draw` is the
    number of the training step (see `Loss.choose`); with None, all classes are computed. If
    `over_data` is false, the gradients of `parameters` are not summed over the data group. `update`
    replaces the gradient of the class rows.

    If `rows_of_ranks` is given (see `ClassHead.forward`), only this rank's numbers of rows and
    labels are checked, a NaN loss is returned, and the host does not wait for the device.

    Creating a step is collective. Raises ValueError on every rank if any rank has a label outside
    the classes or features that do not match its labels, if a training step of a batch loss has
    fewer than two rows, or if the ranks require different gradients.
    """

    def __init__(
        self,
        engine: Engine,
        batch: Batch,
        parameters: Parameters,
        *,
        training: bool = False,
        draw: int | None = None,
        over_data: bool = True,
        rows_of_ranks: Sequence[int] | None = None,
        labels_of_ranks: Sequence[int] | None = None,
        update: RowUpdate | None = None,
    ) -> None:
        self.engine, self.parameters = engine, parameters
        self._training, self._draw, self._over_data = training, draw, over_data
        self._is_checked = rows_of_ranks is None
        if rows_of_ranks is None:
            call = f"{'training' if training else 'evaluation'}, draw {draw}"
            self.counts, self._label_counts = agree(engine, batch, parameters, call=call)
        else:
            self.counts, self._label_counts, batch = known_rows(
                engine, batch, rows_of_ranks, labels_of_ranks
            )
        self._batch = batch._replace(labels=batch.labels.long())
        # Gradients are always disabled inside an autograd Function, so read these here.
        self._needs = Required.of(batch.features, parameters)
        learns = training and self._needs.vectors
        if update is None and learns and parameters.row_scales is not None:
            raise ValueError(
                "fp8 class rows have no gradient: create a heads.FusedSGD for the head, or call "
                "head.eval()"
            )
        self._update = update if learns else None
        self._with_graph = any(self._needs)

    def loss(self) -> Tensor:
        """Return the loss, the same scalar on every rank (collective).

        Backward computes the gradients of the mean over the global batch with respect to the
        parameters and to these rows of the features. They are complete and need no further
        reduction. A gradient that is not required is not computed. Raises FloatingPointError on
        every rank if the loss is NaN, unless `rows_of_ranks` is given.
        """
        features, parameters = self._batch.features, self.parameters
        loss: Tensor = _HeadLoss.apply(self, features, *parameters)
        if self._is_checked and math.isnan(loss.item()):
            raise nan_loss(self.engine, len(features), non_finite_rows(features), parameters)
        if self._update is not None:
            loss = loss + _RequiresRows.apply(parameters.vectors, loss.detach(), self._update)
        return loss

    # ------------------------------------------------------------------------ forward

    def forward(self) -> Tensor:
        """Compute the loss, as described in the module docstring (collective)."""
        engine, counts, (_, labels, row_weights) = self.engine, self.counts, self._batch
        labels_G = all_gather_labels(
            labels, counts.sizes, self._label_counts.sizes, engine.class_group
        )
        labels_m = all_gather_labels(
            labels_G, counts.group_sizes, self._label_counts.group_sizes, engine.data_group
        )
        if row_weights is not None:
            row_weights = counts.gather(engine, row_weights)
        if self._draw is not None:
            engine.loss.check_batch(len(labels_m))
        self._logits = logits = self._gathered(labels_G, labels_m)
        if self._update is not None and logits.choice is not None:
            self._update.check_choice(engine.loss.kind)
        with _without_autocast(logits.features_Gd.device):
            self.walk = self._walk()
            parts = self.walk.statistics()
            weights = loss_weights(engine.loss, engine.class_weights, labels_m, row_weights)
            if weights is not None:
                weights = weights.to(logits.stats_dtype)
            sets = labels_m if isinstance(labels_m, LabelSets) else None
            rows = Rows(engine.num_classes, class_ids_of(labels_m), weights, sets)
            with torch.set_grad_enabled(self._with_graph):
                self._loss = self._global_loss(parts, rows)
        return self._loss.detach()

    def _walk(self) -> TorchWalk | TileWalk:
        """Return the walk over this rank's classes. Sampled classes are few, so their logits are
        computed with torch operations."""
        engine, logits = self.engine, self._logits
        tile = engine.loss.tile
        if engine.tiles and tile is not None and logits.choice is None:
            # A head may have been moved or converted since it was created.
            check_tiles(engine.loss, logits.features_Gd.device, logits.compute_dtype)
            return TileWalk(logits, tile, with_graph=self._with_graph)
        return TorchWalk(logits, with_graph=self._with_graph)

    def _global_loss(self, parts: Sequence[Stats], rows: Rows) -> Tensor:
        """Exchange this rank's statistics over both groups and return the loss (collective).

        `parts` are the statistics of disjoint parts of this rank's classes, none for a rank without
        classes.

        Every rank of a class group has different classes and the same rows, so their statistics are
        merged. Along `data`, the class groups have different rows, so their totals are
        concatenated. Each rank treats the statistics of the others as constants and differentiates
        with respect to its own, without a further collective. For example, the cross-entropy of a
        row over two ranks is log(e^a + e^b) - z_y, where a and b are the logsumexp of the logits on
        rank 0 and on rank 1. Rank 0 computes the derivative with respect to a, e^a / (e^a + e^b),
        and rank 1 the derivative with respect to b. Both compute the same loss.
        """
        loss, (class_group, data_group) = self.engine.loss, self.engine.groups
        total = loss.merge(parts) if parts else self._logits.identity()
        if class_group is not None:
            total = loss.merge(self._exchanged(total, class_group, None, None))
        if data_group is not None:
            num_rows, num_labels = self.counts.group_sizes, self._label_counts.group_sizes
            totals = self._exchanged(total, data_group, num_rows, num_labels)
            total = tuple(torch.cat(column) for column in zip(*totals, strict=True))
        value = loss.value(total, rows)
        if rows.sets is None:
            return value
        # A row without labels may not affect the value, but its gradient is NaN if its logits are.
        return value.where((total[0] < torch.inf).all(), torch.nan)

    def _exchanged(
        self,
        stats: Stats,
        group: ProcessGroup,
        num_rows: list[int] | None,
        num_labels: list[int] | None,
    ) -> list[Stats]:
        """Gather all ranks' statistics: in one collective, or with label sets in one for rows and
        one for labels (None: every rank has as many)."""
        if self._logits.row_of_label is None:
            return _exchanged(stats, group, num_rows)
        of_rows = _exchanged(stats[:-1], group, num_rows)
        of_labels = _exchanged(stats[-1:], group, num_labels)
        return [(*rows, *labels) for rows, labels in zip(of_rows, of_labels, strict=True)]

    def _gathered(
        self, labels_G: Tensor | LabelSets, labels_m: Tensor | LabelSets
    ) -> BlockwiseLogits:
        """Gather the features and the boundary rows of the class group (collective)."""
        engine, parameters = self.engine, self.parameters
        features, logit_map = self._batch.features, engine.logit_map
        device, compute_dtype = features.device, features.dtype
        if torch.is_autocast_enabled(device.type):
            compute_dtype = torch.get_autocast_dtype(device.type)
        stats_dtype = torch.promote_types(compute_dtype, torch.float32)
        scale: Tensor | float = logit_map.scale
        if parameters.log_scale is not None:
            scale = parameters.log_scale.exp()
        self._scale = scale
        with _without_autocast(device):
            mapped = logit_map.mapped(features, scale).to(compute_dtype)
        offset, margins, bias = parameters.offset, None, None
        if offset is None and logit_map.offset:
            offset = torch.full((), logit_map.offset, dtype=stats_dtype, device=device)
        if self._training and logit_map.has_margin:
            margins = Margins(logit_map, scale, eps=torch.finfo(compute_dtype).eps)
        features_Gd = all_gather_rows(mapped, self.counts.sizes, engine.class_group)
        vectors = NodeValues(parameters.vectors, parameters.row_scales)
        vectors = engine.weights.with_boundary(vectors, engine.class_group)
        if parameters.bias is not None:
            bias = NodeValues(parameters.bias.unsqueeze(1))
            bias = engine.weights.with_boundary(bias, engine.class_group)
        return BlockwiseLogits(
            weights=engine.weights,
            loss=engine.loss,
            logit_map=logit_map,
            memory_bytes=engine.logit_bytes,
            processor=engine.processor,
            updates_rows=self._update is not None,
            features_Gd=features_Gd,
            labels_P=class_ids_of(labels_G),
            row_of_label=labels_G.row_of_label if isinstance(labels_G, LabelSets) else None,
            label_offsets=labels_G.offsets if isinstance(labels_G, LabelSets) else None,
            most_rows=max(self.counts.group_sizes),
            rows=vectors,
            bias=bias,
            offset=offset,
            log_prior=engine.log_prior if self._training else None,
            margins=margins,
            choice=engine.loss.choose(engine.weights.held, class_ids_of(labels_m), self._draw),
            compute_dtype=compute_dtype,
            stats_dtype=stats_dtype,
        )

    # ------------------------------------------------------------------------ backward

    def backward(self, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the features, the vectors, the bias, the logarithm of the scale
        and the offset (collective)."""
        needs, logits, update = self._needs, self._logits, self._update
        sums = GradientSums(needs.features or needs.log_scale)
        if needs.vectors and update is None and logits.rows.scales is None:  # fp8 has no gradient
            sums.rows = HeldGradient(logits.weights, logits.gradient_like(logits.rows))
        if needs.bias and logits.bias is not None:
            sums.bias = logits.gradient_like(logits.bias)
        if needs.log_scale or needs.offset:
            sums.scalars = logits.features_Gd.new_zeros(2, dtype=logits.stats_dtype)
        if update is not None and update.is_required():
            update.visit(
                lambda step: self._walk_rows(grad_loss, sums, step),
                again=lambda step: self._walk_rows(grad_loss, GradientSums(), step),
                key=self._draw or 0,
                skipped=~self._loss.detach().isfinite(),
            )
        else:
            self._walk_rows(grad_loss, sums)
        by_features, by_vectors, by_bias = self._reduced_features(sums), None, None
        if isinstance(sums.rows, HeldGradient):
            by_vectors = self._reduced_nodes(sums.rows.grad, like=logits.rows.held)
        if sums.bias is not None and logits.bias is not None:
            by_bias = self._reduced_nodes(sums.bias, like=logits.bias.held).squeeze(1)
        return by_features, by_vectors, by_bias, *self._reduced_scalars(sums.scalars)

    @torch.no_grad()
    def _walk_rows(
        self, grad_loss: Tensor, sums: GradientSums, step: RowStep | None = None
    ) -> Tensor | None:
        """Add the gradients of this rank's blocks to `sums`. If `step` is given, update the class
        rows and return the squared norm of their gradient (collective)."""
        engine, rows = self.engine, None
        # Disable autocast, as in forward, even if the caller runs backward under autocast: the
        # engine itself chooses the precision of each step.
        with _without_autocast(grad_loss.device):
            if step is not None and self._update is not None:
                sums.rows = rows = self._update.rows(
                    engine.weights,
                    self._logits.rows,
                    step,
                    on_gpu=engine.processor.kind == "cuda",
                    class_group=engine.class_group,
                    data_group=engine.data_group,
                )
            self.walk.add_gradients(self._loss, grad_loss.to(self._loss.dtype), sums)
            if sums.rows is not None:
                sums.rows.finish()
        return None if rows is None else rows.squared_norm

    def _reduced_features(self, sums: GradientSums) -> Tensor | None:
        """Return the gradient of this rank's features, and add to that of the scale (collective).

        Every rank of the class group has the terms of its own classes for all G rows. A
        reduce-scatter, the reverse of the all-gather in forward, sums the terms and gives each rank
        its own rows.
        """
        if not sums.needs_features:
            return None
        terms, features, logit_map = sums.features, self._batch.features, self.engine.logit_map
        if terms is None:  # this rank does not hold any classes
            terms = torch.zeros_like(self._logits.features_Gd, dtype=self._logits.stats_dtype)
        with _without_autocast(terms.device):
            grad = reduce_scatter_rows(terms, self.counts.sizes, self.engine.class_group)
            if sums.scalars is not None:
                # The mapped features are exp(log_scale) times vectors that do not depend on
                # log_scale, so their derivative with respect to log_scale equals the mapped
                # features.
                sums.scalars[0] += (grad * logit_map.mapped(features, self._scale)).sum()
            if not self._needs.features:
                return None
            return logit_map.gradient_of_features(features, self._scale, grad)

    def _reduced_nodes(self, grad: Tensor, *, like: Tensor) -> Tensor:
        """Convert the gradient of path sums to that of node vectors or biases (collective)."""
        self.engine.weights.sum_gradients(grad, self.engine.class_group)
        if self._over_data:
            all_reduce_sum(grad, self.engine.data_group)
        return grad.to(like.dtype)

    def _reduced_scalars(self, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the logarithm of the scale and of the offset (collective).

        Each rank has the terms of its own classes and rows, so the sum is over both groups.
        """
        if grad is None:
            return None, None
        all_reduce_sum(grad, self.engine.class_group)
        if self._over_data:
            all_reduce_sum(grad, self.engine.data_group)
        log_scale, offset = self.parameters.log_scale, self.parameters.offset
        return (
            None if log_scale is None else grad[0].to(log_scale.dtype),
            None if offset is None else grad[1].to(offset.dtype),
        )


class _HeadLoss(torch.autograd.Function):
    """The loss of a `Step` as a function of its features and parameters."""

    @staticmethod
    def forward(ctx: Any, step: Step, features: Tensor, *parameters: Tensor | None) -> Tensor:
        ctx.step = step
        # Save these tensors only for their version counters, so that backward raises an error if
        # one of them was modified in place.
        ctx.save_for_backward(features, *(each for each in parameters if each is not None))
        return step.forward()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the head does not support second derivatives: call backward without create_graph"
            )
        ctx.saved_tensors  # noqa: B018  raises if a saved tensor was modified in place
        return None, *ctx.step.backward(grad_loss), None


class _RequiresRows(torch.autograd.Function):
    """A zero whose backward pass notes in `update` that the gradient of `vectors` is required.

    `torch.autograd.grad(loss, features)` does not run it, so the rows are not updated. Autograd
    runs it before `_HeadLoss`, because it was created later.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, loss: Tensor, update: RowUpdate) -> Tensor:
        ctx.update = update
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[None, None, None]:
        ctx.update.require()
        return None, None, None


def _without_autocast(device: torch.device) -> AbstractContextManager[None]:
    # Entering `torch.autocast` takes as long as a small matrix product.
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


def _exchanged(stats: Stats, group: ProcessGroup, sizes: list[int] | None) -> list[Stats]:
    """Gather all ranks' statistics in one collective, packed into a tensor [rows, width]. `sizes`
    are their numbers of rows (None: all equal). This rank's own are returned unchanged, with their
    autograd graph."""
    widths = [math.prod(stat.shape[1:]) for stat in stats]
    columns = [stat.detach().reshape(-1, width) for stat, width in zip(stats, widths, strict=True)]
    packed = torch.cat(columns, dim=1)
    if sizes is None:
        gathered: Sequence[Tensor] = all_gather_equal(packed, group)
    else:
        gathered = all_gather_rows(packed, sizes, group).split(sizes)
    ranks = [
        tuple(
            part.reshape(len(part), *stat.shape[1:])
            for part, stat in zip(of_rank.split(widths, dim=1), stats, strict=True)
        )
        for of_rank in gathered
    ]
    ranks[group_rank(group)] = stats
    return ranks
