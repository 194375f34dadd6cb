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
     them over the data group, and compute the value (`heads/engine/global_loss.py`).

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
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import (
    all_gather_rows,
    all_reduce_sum,
    group_rank,
    group_size,
    reduce_scatter_rows,
)
from heads.engine.block_size import Processor
from heads.engine.blockwise import BlockwiseLogits, GradientSums, HeldGradient
from heads.engine.global_loss import global_loss
from heads.engine.inputs import (
    Agreement,
    Parameters,
    Required,
    RowWeighting,
    agree,
    class_ids,
    nan_loss,
    non_finite_rows,
    options_of,
    with_known_rows,
)
from heads.engine.torch_walk import TorchWalk
from heads.logits import LogitMap, MappedFeatures, Margins
from heads.losses import Loss, Rows
from heads.rows.node_values import NodeValues
from heads.rows.row_update import RowUpdate, Step, UpdatedRows
from heads.tiles.launch import check_tiles
from heads.tiles.walk import TileWalk
from heads.weights import ClassWeights


@dataclass(frozen=True)
class _Call:
    """The options of one call to `Engine`, and the `Agreement` of the ranks. `checks`: the host may
    wait for the device to check the batch. `update`: replaces the gradient of the class rows."""

    agreement: Agreement
    grad_enabled: bool
    training: bool
    draw: int | None
    over_data: bool
    checks: bool
    update: RowUpdate | None = None

    @property
    def computes_gradients(self) -> bool:
        return self.grad_enabled and any(self.agreement.needs)


@dataclass(frozen=True)
class Engine:
    """The constants of one head: the plan of its weights, its loss and its process groups.

    The ranks of `class_group` have different classes and compute the same rows; the ranks of
    `data_group` have the same classes and different rows. None means a single process.
    `processor` selects the code and the block sizes for a CPU or a GPU. `memory_bytes` limits the
    memory used for logits (None: the default of the processor). In training, `log_prior` [K] is
    added to them. If `tiles` is set, the kernels in `heads/tiles` compute the logits.
    """

    weights: ClassWeights
    loss: Loss
    class_group: ProcessGroup | None
    data_group: ProcessGroup | None
    logit_map: LogitMap
    processor: Processor
    memory_bytes: int | None = None
    log_prior: Tensor | None = None
    row_weighting: RowWeighting = RowWeighting()  # noqa: RUF009  it is frozen
    tiles: bool = False

    @cached_property
    def settings(self) -> dict[str, str]:
        """What must be equal on every rank, as texts by what they describe."""
        weights = self.row_weighting.class_weights
        return {
            "label trees": f"{self.weights.tree_digest:08x}",
            "losses": options_of(self.loss),
            "logit maps": options_of(self.logit_map),
            "class weights": "none" if weights is None else f"{_checksum(weights):08x}",
            "ignore_index": str(self.row_weighting.ignore_index),
        }

    @property
    def logit_bytes(self) -> int:
        """The memory limit for logits in bytes."""
        if self.memory_bytes is None:
            return self.processor.default_memory_mib << 20
        return self.memory_bytes

    def __call__(
        self,
        features: Tensor,
        labels: Tensor,
        parameters: Parameters,
        *,
        row_weights: Tensor | None = None,
        training: bool = False,
        draw: int | None = None,
        over_data: bool = True,
        rows_of_ranks: Sequence[int] | None = None,
        update: RowUpdate | None = None,
    ) -> Tensor:
        """Return the loss of the global batch, the same scalar on every rank (collective).

        `features` [b, d] and `labels` [b] are this rank's rows; b may differ across ranks and may
        be 0. Backward computes the gradients of the mean over the global batch with respect to
        `parameters` and to these rows of `features`. They are complete and need no further
        reduction. A gradient that no rank requires is not computed; ranks may require different
        gradients. `row_weights` [b], which multiply the weights of the rows, must be passed on
        every rank or on none. If `training` is true, logits include the margin and the prior of the
        logit map. `draw` is the number of the training step (see `Loss.choose`); with None, all
        classes are computed. If `over_data` is false, the gradients of `parameters` are not summed
        over the data group.

        `rows_of_ranks` lists the number of rows on each rank (see `ClassHead.forward`). If it is
        given, the call checks only this rank's row count, and a NaN loss is returned. A wrong count
        makes the loss NaN on every rank (see `with_known_rows`). The call itself does not make the
        host wait for the device.

        Raises ValueError on every rank if any rank has a label outside the classes or features that
        do not match its labels, if a training step of a batch loss has fewer than two rows, or if
        `over_data` is false and a parameter requires a gradient on only some ranks. Raises
        FloatingPointError on every rank if the loss is NaN.
        """
        given = features, row_weights
        are_floats = all(isinstance(each, Tensor) and each.is_floating_point() for each in given)
        if row_weights is not None and are_floats:
            # Cast first: a small weight may become 0 in the dtype of the computation, and `agree`
            # must receive the weights that the loss uses.
            row_weights = row_weights.to(torch.promote_types(features.dtype, torch.float32))
        if rows_of_ranks is None:
            called = "training" if training else "evaluation"
            agreement = self.agree(
                features, labels, parameters, row_weights, call=f"{called}, draw {draw}"
            )
        else:
            groups = self.class_group, self.data_group
            agreement = Agreement.of_known_rows(rows_of_ranks, features, parameters, *groups)
            features, labels, row_weights = with_known_rows(
                features,
                labels,
                row_weights,
                agreement.sizes[group_rank(self.class_group)],
                is_alone=len(rows_of_ranks) == 1,
                ignore_index=self.row_weighting.ignore_index,
            )
        if agreement.partly_frozen and not over_data and group_size(self.data_group) > 1:
            raise ValueError(
                "a parameter of the head requires a gradient on only some ranks, so its gradient "
                "cannot be accumulated over micro-batches: call requires_grad_ with the same value "
                "on every rank"
            )
        learns = training and torch.is_grad_enabled() and parameters.vectors.requires_grad
        if update is None and learns and parameters.row_scales is not None:
            raise ValueError(
                "fp8 class rows have no gradient: create a heads.FusedSGD for the head, or call "
                "head.eval()"
            )
        if update is not None and agreement.partly_frozen:
            raise ValueError(
                "a parameter of the head requires a gradient on only some ranks, so FusedSGD "
                "cannot update it: call requires_grad_ with the same value on every rank"
            )
        call = _Call(
            agreement=agreement,
            grad_enabled=torch.is_grad_enabled(),  # always false inside a Function, so read it here
            training=training,
            draw=draw,
            over_data=over_data,
            checks=rows_of_ranks is None,
            update=update if learns else None,
        )
        anchor, ids = agreement.anchor(features.device), class_ids(labels)
        loss: Tensor = _HeadLoss.apply(features, *parameters, anchor, ids, row_weights, self, call)
        if rows_of_ranks is None and math.isnan(loss.item()):
            raise self.nan_loss(len(features), non_finite_rows(features), parameters)
        if call.update is not None:
            loss = loss + _RequiresRows.apply(parameters.vectors, loss.detach(), call.update)
        return loss

    def walk(self, logits: BlockwiseLogits, *, with_graph: bool) -> TorchWalk | TileWalk:
        """Return the walk over this rank's classes, with or without tiles.

        Sampled classes are few, so their logits are computed with torch operations. Raises
        ValueError if tiles do not support the device of the head or the dtype of the products.
        """
        tile = self.loss.tile
        if self.tiles and tile is not None and logits.choice is None:
            # A head may have been moved or converted since it was created.
            check_tiles(self.loss, logits.features_Gd.device, logits.compute_dtype)
            return TileWalk(logits, tile, with_graph=with_graph)
        return TorchWalk(logits, with_graph=with_graph)

    def nan_loss(
        self, num_rows: int, broken_rows: Tensor, parameters: Parameters
    ) -> FloatingPointError:
        """Return the error for a NaN loss; see `heads/engine/inputs.py` (collective)."""
        vectors, bias = parameters.vectors, parameters.bias
        groups = self.class_group, self.data_group
        return nan_loss(num_rows, broken_rows, vectors, bias, *groups)

    def agree(
        self,
        features: Tensor,
        labels: Tensor,
        parameters: Parameters,
        row_weights: Tensor | None = None,
        *,
        call: str = "",
    ) -> Agreement:
        """Exchange sizes and check the batch on all ranks (collective). See
        `heads/engine/inputs.py`. `call` describes the mode and the draw, which must be equal."""
        return agree(
            features,
            labels,
            parameters,
            row_weights,
            settings={**self.settings, "mode and draw": call},
            num_classes=self.weights.tree.num_classes,
            row_weighting=self.row_weighting,
            class_group=self.class_group,
            data_group=self.data_group,
        )

    def rows(
        self,
        labels: Tensor,
        dtype: torch.dtype,
        factors: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Rows:
        """Return the `Rows` that `Loss.value` needs.

        `labels` [m] are the labels of these rows, and `factors` [m] their `row_weights`, if given.
        `counts` [m] is false for ignored rows (None: there are none), whose labels must be valid.
        """
        is_uniform = self.row_weighting.class_weights is None and factors is None
        if is_uniform and counts is None:
            return Rows(self.weights.tree.num_classes, labels)
        weights = self.row_weighting(labels, factors).to(dtype)
        if counts is not None:
            weights = weights.where(counts, 0)
        return Rows(self.weights.tree.num_classes, labels, weights, counts)

    def to(self, device: torch.device) -> "Engine":
        """Return the same engine with its plan and constants on another device."""
        prior = self.log_prior
        return replace(
            self,
            weights=self.weights.rebuilt(self.weights.tree, device),
            processor=Processor.of(device),
            loss=self.loss.to(device),
            row_weighting=self.row_weighting.to(device),
            log_prior=None if prior is None else prior.to(device),
        )


class _HeadLoss(torch.autograd.Function):
    """The algorithm described in the module docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        vectors: Tensor,
        bias: Tensor | None,
        log_scale: Tensor | None,
        offset: Tensor | None,
        row_scales: Tensor | None,
        anchor: Tensor,
        labels: Tensor,
        row_weights: Tensor | None,
        engine: Engine,
        call: _Call,
    ) -> Tensor:
        parameters = Parameters(vectors, bias, log_scale, offset, row_scales)
        batch = _GlobalRows.gather(engine, call.agreement, labels, row_weights)
        if call.draw is not None:
            engine.loss.check_batch(batch.num_rows(exact=call.checks))
        scale = engine.logit_map.scale if log_scale is None else log_scale.exp()
        masked = engine.row_weighting.masked(features, labels)  # ignored rows may contain NaN
        inputs = MappedFeatures(engine.logit_map, masked, scale)
        logits = _gathered(engine, inputs, parameters, batch.labels_G, call)
        logits.choice = engine.loss.choose(engine.weights.held, batch.labels_m, call.draw)
        if call.update is not None and logits.choice is not None:
            call.update.check_choice(engine.loss.kind)
        with _without_autocast(features.device.type):
            walk = engine.walk(logits, with_graph=call.computes_gradients)
            parts = walk.statistics()
            with torch.set_grad_enabled(call.computes_gradients):
                loss = global_loss(
                    engine.loss,
                    parts,
                    engine.rows(batch.labels_m, logits.stats_dtype, batch.weights_m, batch.counts),
                    identity=logits.identity,
                    sources=batch.sources,
                    group_sizes=call.agreement.group_sizes,
                    class_group=engine.class_group,
                    data_group=engine.data_group,
                )
        ctx.engine, ctx.call, ctx.parameters, ctx.inputs = engine, call, parameters, inputs
        ctx.logits, ctx.walk, ctx.loss = logits, walk, loss
        # Save these tensors only for their version counters, so that backward raises an error if
        # one of them was modified in place.
        ctx.save_for_backward(features, *(each for each in parameters if each is not None))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the head does not support second derivatives: call backward without create_graph"
            )
        ctx.saved_tensors  # noqa: B018  raises if a saved tensor was modified in place
        if not ctx.call.computes_gradients:
            return (None,) * 11
        logits: BlockwiseLogits = ctx.logits
        # Disable autocast, as in forward, even if the caller runs backward under autocast: the
        # engine itself chooses the precision of each step.
        with _without_autocast(grad_loss.device.type):
            needs = ctx.call.agreement.needs
            sums = _gradient_buffers(needs, logits)
            grad_loss = grad_loss.to(ctx.loss.dtype)
            update = ctx.call.update
            if update is None:
                sums.rows = _buffer_of_rows(needs, logits)
                _walk(ctx, grad_loss, sums)
            elif update.is_required():
                _update_rows(ctx, update, grad_loss, sums)
            else:
                _walk(ctx, grad_loss, sums)
            by_features = _reduced_features(ctx, sums)
            by_vectors = None
            if isinstance(sums.rows, HeldGradient):
                by_vectors = _reduced_nodes(ctx, logits.rows, sums.rows.grad)
            by_bias = _reduced_nodes(ctx, logits.bias, sums.bias)
            by_bias = None if by_bias is None else by_bias.squeeze(1)
            by_scalars = _reduced_scalars(ctx, sums.scalars)
        return by_features, by_vectors, by_bias, *by_scalars, *(None,) * 6


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


def _checksum(tensor: Tensor) -> int:
    # NumPy has no bf16.
    return zlib.crc32(tensor.detach().float().cpu().contiguous().numpy().tobytes())


def _without_autocast(device: str) -> AbstractContextManager[None]:
    # Entering `torch.autocast` takes as long as a small matrix product.
    return (
        torch.autocast(device, enabled=False)
        if torch.is_autocast_enabled(device)
        else nullcontext()
    )


# ---------------------------------------------------------------------------- forward: gather


@dataclass(frozen=True)
class _GlobalRows:
    """Labels of the gathered rows.

    `labels_G` are the labels of the class group. `labels_m` and `weights_m` are the labels and the
    `row_weights` of the rows of the global batch. If rows may be ignored, `counts` [m] is false for
    ignored rows, and `sources` [m] are the positions of the rows that replace them: see `Rows`.
    """

    labels_G: Tensor
    labels_m: Tensor
    weights_m: Tensor | None
    counts: Tensor | None = None
    sources: Tensor | None = None

    @classmethod
    def gather(
        cls, engine: Engine, agreement: Agreement, labels: Tensor, row_weights: Tensor | None
    ) -> "_GlobalRows":
        """Gather this rank's labels and row weights over both groups (collective)."""
        sizes, group_sizes = agreement.sizes, agreement.group_sizes
        labels_G = all_gather_rows(labels, sizes, engine.class_group)
        labels_m = all_gather_rows(labels_G, group_sizes, engine.data_group)
        if row_weights is not None:
            row_weights = all_gather_rows(row_weights, sizes, engine.class_group)
            row_weights = all_gather_rows(row_weights, group_sizes, engine.data_group)
        if engine.row_weighting.ignore_index is None:
            return cls(labels_G, labels_m, row_weights)
        # An ignored row needs a valid class to compute its statistics. Any class will do, because
        # the loss does not use them.
        known_G = labels_G.where(engine.row_weighting.counts(labels_G), 0)
        counts = engine.row_weighting.counts(labels_m)
        # Removing the ignored rows would make the host wait for their number. The statistics of a
        # row of zeros may have an infinite loss, and 0 times infinity is NaN, so a row that counts
        # replaces each of them.
        sources = torch.arange(len(counts), device=counts.device)
        sources = sources.where(counts, counts.int().argmax())
        return cls(known_G, labels_m.where(counts, 0)[sources], row_weights, counts, sources)

    def num_rows(self, *, exact: bool) -> int:
        """Return the number of rows that are not ignored, or, without reading from the device, an
        upper bound."""
        if self.counts is None or not exact:
            return len(self.labels_m)
        return int(self.counts.sum())


def _gathered(
    engine: Engine, inputs: MappedFeatures, parameters: Parameters, labels_G: Tensor, call: _Call
) -> BlockwiseLogits:
    """Gather the features and the boundary rows of the class group (collective)."""
    features, vectors, bias = inputs.features, parameters.vectors, parameters.bias
    device = features.device.type
    autocast = torch.is_autocast_enabled(device)
    compute_dtype = torch.get_autocast_dtype(device) if autocast else features.dtype
    stats_dtype = torch.promote_types(compute_dtype, torch.float32)
    with _without_autocast(device):
        mapped = inputs.mapped().to(compute_dtype)
    features_Gd = all_gather_rows(mapped, call.agreement.sizes, engine.class_group)
    weights, group, logit_map = engine.weights, engine.class_group, engine.logit_map
    offset, margins = parameters.offset, None
    if offset is None and logit_map.offset:
        offset = torch.full((), logit_map.offset, dtype=stats_dtype, device=features.device)
    if call.training and logit_map.has_margin:
        margins = Margins(logit_map, inputs.scale, eps=torch.finfo(compute_dtype).eps)
    return BlockwiseLogits(
        weights=weights,
        loss=engine.loss,
        logit_map=logit_map,
        memory_bytes=engine.logit_bytes,
        processor=engine.processor,
        updates_rows=call.update is not None,
        features_Gd=features_Gd,
        labels_G=labels_G,
        most_rows=max(call.agreement.group_sizes),
        rows=weights.with_boundary(NodeValues(vectors, parameters.row_scales), group),
        bias=None if bias is None else weights.with_boundary(NodeValues(bias.unsqueeze(1)), group),
        offset=offset,
        log_prior=engine.log_prior if call.training else None,
        margins=margins,
        choice=None,
        compute_dtype=compute_dtype,
        stats_dtype=stats_dtype,
    )


# ---------------------------------------------------------------------------- backward: reduce


def _gradient_buffers(needs: Required, logits: BlockwiseLogits) -> GradientSums:
    """Create buffers for the gradients that are required, except those of class rows.

    A gradient is a sum over ranks. If one rank requires it, all ranks that contribute to it must
    compute their terms.
    """
    sums = GradientSums(needs.features or needs.log_scale)
    if needs.bias and logits.bias is not None:
        sums.bias = logits.gradient_like(logits.bias)
    if needs.log_scale or needs.offset:
        sums.scalars = logits.features_Gd.new_zeros(2, dtype=logits.stats_dtype)
    return sums


def _buffer_of_rows(needs: Required, logits: BlockwiseLogits) -> HeldGradient | None:
    if not needs.vectors or logits.rows.scales is not None:  # fp8 has no gradient
        return None
    return HeldGradient(logits.weights, logits.gradient_like(logits.rows))


def _walk(ctx: Any, grad_loss: Tensor, sums: GradientSums) -> None:
    ctx.walk.add_gradients(ctx.loss, grad_loss, sums)
    if sums.rows is not None:
        sums.rows.finish()


def _update_rows(ctx: Any, update: RowUpdate, grad_loss: Tensor, sums: GradientSums) -> None:
    """Compute the gradients, and update the class rows or prepare their update (collective)."""
    engine, call, logits = ctx.engine, ctx.call, ctx.logits
    device = logits.features_Gd.device.type

    def rows(step: Step) -> UpdatedRows:
        return update.rows(
            engine.weights,
            logits.rows,
            step,
            on_gpu=engine.processor.kind == "cuda",
            class_group=engine.class_group,
            data_group=engine.data_group,
        )

    def walk_again(step: Step) -> None:
        with _without_autocast(device), torch.no_grad():
            _walk(ctx, grad_loss, GradientSums(rows=rows(step)))

    step = update.begin(call.draw or 0, ~ctx.loss.detach().isfinite())
    sums.rows = None if step is None else rows(step)
    _walk(ctx, grad_loss, sums)
    if sums.rows is not None:
        update.squared_norm = sums.rows.squared_norm
    if update.deferred:
        update.keep(walk_again)


def _reduced_features(ctx: Any, sums: GradientSums) -> Tensor | None:
    """Return the gradient of this rank's features, and update the scale's gradient (collective).

    Every rank of the class group has the terms of its own classes for all G rows. A reduce-scatter,
    the reverse of the all-gather in forward, sums the terms and gives each rank its own rows.
    """
    if not sums.needs_features:
        return None
    agreement, inputs, logits = ctx.call.agreement, ctx.inputs, ctx.logits
    terms = sums.features
    if terms is None:  # this rank does not hold any classes
        terms = torch.zeros_like(logits.features_Gd, dtype=logits.stats_dtype)
    grad = reduce_scatter_rows(terms, agreement.sizes, ctx.engine.class_group)
    if sums.scalars is not None:
        # The mapped features are exp(log_scale) times vectors that do not depend on log_scale, so
        # their derivative with respect to log_scale equals the mapped features.
        sums.scalars[0] += (grad * inputs.mapped()).sum()
    return inputs.gradient(grad) if agreement.needs.features else None


def _reduced_nodes(ctx: Any, values: NodeValues | None, grad: Tensor | None) -> Tensor | None:
    """Convert the gradient of path sums to that of node vectors or biases (collective)."""
    if values is None or grad is None:
        return None
    engine: Engine = ctx.engine
    engine.weights.sum_gradients(grad, engine.class_group)
    if ctx.call.over_data:
        all_reduce_sum(grad, engine.data_group)
    return grad.to(values.held.dtype)


def _reduced_scalars(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the logarithm of the scale and of the offset (collective).

    Each rank has the terms of its own classes and rows, so the sum is over both groups.
    """
    if grad is None:
        return None, None
    all_reduce_sum(grad, ctx.engine.class_group)
    if ctx.call.over_data:
        all_reduce_sum(grad, ctx.engine.data_group)
    by_scale, by_offset = (
        None if scalar is None else part.to(scalar.dtype)
        for scalar, part in zip(ctx.parameters[2:4], grad, strict=True)
    )
    return by_scale, by_offset
