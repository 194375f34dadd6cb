"""The exact, memory-bounded, class-sharded loss of a head: one autograd Function for every loss.

Forward walks this rank's classes in blocks and keeps only their statistics, merged over blocks,
then over ranks. Backward differentiates the value of the total with respect to each block's
statistics (tiny tensors) and walks the blocks again to turn those into gradients of features and
weights.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import (
    all_gather_equal,
    all_gather_rows,
    all_reduce_sum,
    group_size,
    reduce_scatter_rows,
)
from heads.labels import class_ids, is_integral
from heads.logits import LogitMap
from heads.losses import Loss, Rows, Stats
from heads.not_finite import nan_loss
from heads.step import Kept, Margins, Parts, Step, vjp
from heads.totals import Others, gradient_of_parts
from heads.weights import ClassBlock, ClassWeights, NodeValues

NOTHING_COUNTS = (
    "the global batch has no rows that count (ignored, or of weight 0): give the head at least one"
)


@dataclass(frozen=True)
class Agreed:
    """What the ranks exchange before they compute, so that all of them make the same decisions.

    `sizes` are the rows of each rank of the class group, `group_sizes` those of each class group
    along `data`. Ranks may require different gradients, but all ranks that contribute to a gradient
    must compute it. `needs_features`: a rank of the class group requires the gradient of its
    features. `needs_vectors`: any rank requires that of a parameter. `partly_frozen`: some ranks
    require that and some do not. `needs_backward`: any rank requires either, so every rank runs a
    backward pass.
    """

    sizes: list[int]
    group_sizes: list[int]
    needs_features: bool
    needs_vectors: bool
    needs_backward: bool
    partly_frozen: bool

    def anchor(self, device: torch.device) -> Tensor:
        """A zero that makes the loss differentiable on every rank or on none.

        Without it, `backward` would fail on a rank whose own inputs are all frozen, while the
        others wait for that rank in a collective.
        """
        return torch.zeros((), device=device, requires_grad=self.needs_backward)


class Parameters(NamedTuple):
    """What a head learns, as far as this rank holds it: node vectors [n, d], the bias of the nodes
    [n], and two scalars, the logarithm of the scale and the offset. None: not learned."""

    vectors: Tensor
    bias: Tensor | None = None
    log_scale: Tensor | None = None
    offset: Tensor | None = None

    @property
    def requires_grad(self) -> bool:
        return any(each.requires_grad for each in self if each is not None)


@dataclass(frozen=True)
class _Call:
    """How `Engine.__call__` was called."""

    agreed: Agreed
    grad_enabled: bool
    training: bool
    draw: int | None
    over_data: bool


@dataclass(frozen=True)
class Engine:
    """How one head computes: its weights' plan, its loss and its process groups.

    `class_group` shares the classes, `data_group` holds the same classes on other rows; None is one
    process. `memory_bytes` bounds what is held for logits at one time. `log_prior` [K] is added to
    the logits in training. A row weighs `class_weights` [K] of its label (None: 1), and nothing
    where the label is `ignore_index`.
    """

    weights: ClassWeights
    loss: Loss
    class_group: ProcessGroup | None
    data_group: ProcessGroup | None
    logit_map: LogitMap
    memory_bytes: int
    log_prior: Tensor | None = None
    class_weights: Tensor | None = None
    ignore_index: int | None = None

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
    ) -> Tensor:
        """The loss of the global batch, the same scalar on every rank.

        `features` [b, d] and `labels` [b] are this rank's rows, b may differ and be 0. All
        gradients are those of the global-mean loss: those of `parameters` are complete, that of
        `features` is complete for these rows. A gradient that no rank requires is not computed;
        ranks may require different ones. `row_weights` [b], on every rank or on none, multiply the
        weights of the rows. In `training` logits have the margin and the prior of the logit map.
        `draw` numbers the training steps (`Loss.choose`); None computes all classes. Without
        `over_data` the gradients of `parameters` lack the sum over the data group.

        Raises, on every rank, ValueError if a label of any rank is outside the classes, features
        and labels of any rank do not fit, a training step of a batch loss has fewer than two rows,
        or `over_data` is false and only some ranks train their weight; FloatingPointError if the
        loss is NaN.
        """
        if row_weights is not None and row_weights.is_floating_point():
            # As they are computed with: what is zero or infinite then is refused.
            row_weights = row_weights.to(torch.promote_types(features.dtype, torch.float32))
        agreed = self.agree(features, labels, parameters, row_weights)
        if agreed.partly_frozen and not over_data and group_size(self.data_group) > 1:
            raise ValueError(
                "the head's weight requires a gradient on some ranks only, so that its copies "
                "cannot accumulate one over micro-batches: call head.requires_grad_ with the same "
                "value on every rank"
            )
        call = _Call(
            agreed=agreed,
            grad_enabled=torch.is_grad_enabled(),  # always false inside the Function
            training=training,
            draw=draw,
            over_data=over_data,
        )
        loss: Tensor = _HeadLoss.apply(
            features,
            *parameters,
            agreed.anchor(features.device),
            class_ids(labels),
            row_weights,
            self,
            call,
        )
        if loss.isnan():
            vectors, bias = parameters.vectors, parameters.bias
            raise nan_loss(features, vectors, bias, self.class_group, self.data_group)
        return loss

    def to(self, device: torch.device) -> "Engine":
        """The same engine for vectors on another device."""
        weights, prior = self.class_weights, self.log_prior
        return replace(
            self,
            weights=self.weights.again(self.weights.tree, device),
            loss=self.loss.to(device),
            class_weights=None if weights is None else weights.to(device),
            log_prior=None if prior is None else prior.to(device),
        )

    def counts(self, labels: Tensor) -> Tensor:
        """Which rows count at all, bool [b]."""
        if self.ignore_index is None:
            return torch.ones_like(labels, dtype=torch.bool)
        return labels != self.ignore_index

    def row_weights(self, labels: Tensor, factors: Tensor | None = None) -> Tensor:
        """What each row weighs [b]: its class's weight, times its factor. Labels outside the
        classes, which `agree` rejects, get an arbitrary weight."""
        counts = self.counts(labels)
        weights = counts.to(torch.float32)
        if self.class_weights is not None:
            known = labels.clamp(0, len(self.class_weights) - 1)
            weights = torch.where(counts, self.class_weights[known], 0)
        return weights if factors is None else weights * factors

    def rows(self, labels: Tensor, dtype: torch.dtype, factors: Tensor | None = None) -> Rows:
        """What `Loss.value` needs of the rows that count, of their labels [m] and the weights [m]
        that they came with."""
        alike = self.class_weights is None and factors is None
        weights = None if alike else self.row_weights(labels, factors).to(dtype)
        return Rows(self.weights.tree.num_classes, labels, weights)

    def agree(
        self,
        features: Tensor,
        labels: Tensor,
        parameters: Parameters,
        row_weights: Tensor | None = None,
    ) -> Agreed:
        """Exchange the sizes of a batch and which gradients are required (collective).

        Errors are exchanged, too: all ranks raise, so that none waits in a collective.
        """
        num_classes, held = self.weights.tree.num_classes, parameters.vectors
        num_counting = outside = 0
        if fits := _fits(features, labels, held, row_weights):
            ids = class_ids(labels)
            counts = self.counts(ids)
            unknown = ((ids < 0) | (ids >= num_classes)) & counts
            weights = self.row_weights(ids, row_weights).where(~unknown, 1)
            num_counting = int((weights > 0).sum())
            outside = int(unknown.sum())
        num_rows = len(labels) if fits else 0
        tree = self.weights.tree_digest
        # Weights on some ranks only would leave the others in another collective.
        types = _code(features.dtype, weighted=row_weights is not None)
        needs = features.requires_grad, parameters.requires_grad
        numbers = [num_rows, num_counting, outside, not fits, tree, types, *needs]
        mine = torch.tensor(numbers, dtype=torch.int64, device=held.device)
        group_ranks = torch.stack(all_gather_equal(mine, self.class_group))
        groups = torch.stack(all_gather_equal(group_ranks.sum(0), self.data_group))
        sizes, *_, trees, dtypes, by_features, _ = group_ranks.T.tolist()
        group_sizes, counting, outsides, misfits, *others = groups.T.tolist()
        group_trees, group_dtypes, all_by_features, by_vectors = others
        if len({*trees}) > 1 or len({*group_trees}) > 1:
            raise ValueError(
                f"the ranks' label trees differ ({tree:08x} on this rank): give every rank the "
                "same tree, as a file that one of them built"
            )
        if any(misfits):
            raise ValueError(
                f"features {list(features.shape)} of {features.dtype} on {features.device} and "
                f"labels {list(labels.shape)} of {labels.dtype} on {labels.device}"
                f"{_described(row_weights)}{'' if fits else ' do not fit'}, {sum(misfits)} ranks "
                f"do not fit: give floats [b, {held.shape[1]}] and b integers, on {held.device}; "
                "row weights are b finite floats of 0 or more"
            )
        if len({*dtypes}) > 1 or len({*group_dtypes}) > 1:
            raise ValueError(
                f"the ranks' features differ in type ({features.dtype} on this rank), or only some "
                "have row weights: give all of them the same"
            )
        if any(outsides):
            raise ValueError(
                f"{sum(outsides)} labels are outside 0..{num_classes - 1}, {outside} of them on "
                "this rank: the data and the head disagree on the classes"
            )
        if not any(counting):
            raise ValueError(NOTHING_COUNTS)
        return Agreed(
            sizes,
            group_sizes,
            needs_features=any(by_features),
            needs_vectors=any(by_vectors),
            needs_backward=any(all_by_features) or any(by_vectors),
            partly_frozen=0 < sum(by_vectors) < len(sizes) * len(group_sizes),
        )


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        vectors: Tensor,
        bias: Tensor | None,
        log_scale: Tensor | None,
        offset: Tensor | None,
        anchor: Tensor,
        labels: Tensor,
        row_weights: Tensor | None,
        engine: Engine,
        call: _Call,
    ) -> Tensor:
        agreed = call.agreed
        sizes, world_rows = agreed.sizes, agreed.group_sizes
        labels_G = all_gather_rows(labels, sizes, engine.class_group)
        labels_m = all_gather_rows(labels_G, world_rows, engine.data_group)
        counts = engine.counts(labels_m)
        labels_m = labels_m[counts]
        if call.draw is not None:
            engine.loss.check_batch(len(labels_m))
        if row_weights is not None:
            row_weights = all_gather_rows(row_weights, sizes, engine.class_group)
            row_weights = all_gather_rows(row_weights, world_rows, engine.data_group)[counts]
        parameters = Parameters(vectors, bias, log_scale, offset)
        inputs = _Inputs.of(engine, features, labels, log_scale)
        step = _step(engine, inputs, parameters, labels_G, call)
        step = replace(step, choice=engine.loss.choose(engine.weights.held, labels_m, call.draw))
        with_grad = call.grad_enabled and (agreed.needs_features or agreed.needs_vectors)
        with torch.autocast(features.device.type, enabled=False):
            blocks = step.blocks()
            kept, parts = Kept(step, blocks, with_grad=with_grad), Parts(len(blocks))
            for index, block in enumerate(blocks):
                rows_Cd = step.class_rows(block)
                logits = step.logits(block, rows_Cd, kept.place(index))
                step.set_margins(block, rows_Cd)
                del rows_Cd
                work = step.work(block, logits, with_graph=kept.graphs)
                parts.put(index, work.stats)
                if kept.graphs:
                    kept.works.append(work)
                del logits, work
            mine = engine.loss.merge(list(parts)) if blocks else step.identity()
            others = Others.gather(
                engine.loss,
                mine,
                engine.rows(labels_m, step.stats_dtype, row_weights),
                counts=None if engine.ignore_index is None else counts,
                world_rows=world_rows,
                class_group=engine.class_group,
                data_group=engine.data_group,
            )
            loss = others.value(mine)
        ctx.engine, ctx.call, ctx.inputs = engine, call, inputs
        ctx.step, ctx.blocks, ctx.kept = step, blocks, kept
        ctx.parts, ctx.others, ctx.parameters = parts, others, parameters
        # Kept for their version counters: a weight changed in place before backward is an error.
        ctx.save_for_backward(features, *(each for each in parameters if each is not None))
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("the head has no second derivative: leave create_graph out")
        # As in forward, whatever the caller's backward runs under: precisions are chosen here.
        with torch.autocast(grad_loss.device.type, enabled=False):
            return *_gradients(ctx, grad_loss), *(None,) * 5


@dataclass(frozen=True)
class _Inputs:
    """This rank's `features` [b, d], what an ignored row holds left out, and what the product is
    taken of: `scale` times what the logit map makes of them."""

    logit_map: LogitMap
    features: Tensor
    scale: Tensor | float

    @classmethod
    def of(
        cls, engine: Engine, features: Tensor, labels: Tensor, log_scale: Tensor | None
    ) -> "_Inputs":
        if engine.ignore_index is not None:
            # What an ignored row holds must not matter: 0 times NaN would be NaN.
            features = features.where(engine.counts(labels).unsqueeze(1), 0)
        scale = engine.logit_map.scale if log_scale is None else log_scale.exp()
        return cls(engine.logit_map, features, scale)

    @property
    def is_scaled(self) -> bool:
        return isinstance(self.scale, Tensor) or self.scale != 1

    def mapped(self) -> Tensor:
        features = self.logit_map.normalized(self.features)
        return self.scale * features if self.is_scaled else features

    def gradient(self, grad: Tensor) -> Tensor:
        """That of the features, of that of what they are mapped to."""
        if self.is_scaled:
            grad = self.scale * grad
        if self.logit_map.normalizes:
            grad = vjp(self.logit_map.normalized, self.features, grad)
        return grad.to(self.features.dtype)


def _step(
    engine: Engine, inputs: _Inputs, parameters: Parameters, labels_G: Tensor, call: _Call
) -> Step:
    """Gathers what the class group shares (collective)."""
    features, vectors, bias = inputs.features, parameters.vectors, parameters.bias
    device = features.device.type
    autocast = torch.is_autocast_enabled(device)
    compute_dtype = torch.get_autocast_dtype(device) if autocast else features.dtype
    stats_dtype = torch.promote_types(compute_dtype, torch.float32)
    with torch.autocast(device, enabled=False):
        mapped = inputs.mapped().to(compute_dtype)
    features_Gd = all_gather_rows(mapped, call.agreed.sizes, engine.class_group)
    weights, group, logit_map = engine.weights, engine.class_group, engine.logit_map
    offset, margins = parameters.offset, None
    if offset is None and logit_map.offset:
        offset = features.new_tensor(logit_map.offset, dtype=stats_dtype)
    if call.training and logit_map.has_margin:
        like = features.new_empty(len(features_Gd), dtype=stats_dtype)
        eps = torch.finfo(compute_dtype).eps
        margins = Margins(logit_map, inputs.scale, eps=eps, like=like)
    return Step(
        weights=weights,
        loss=engine.loss,
        logit_map=logit_map,
        memory_bytes=engine.memory_bytes,
        features_Gd=features_Gd,
        # A row that does not count has any class: its gradient is zero.
        labels_G=labels_G.where(engine.counts(labels_G), 0),
        rows=weights.with_boundary(vectors, group),
        bias=None if bias is None else weights.with_boundary(bias.unsqueeze(1), group),
        offset=offset,
        log_prior=engine.log_prior if call.training else None,
        margins=margins,
        choice=None,
        compute_dtype=compute_dtype,
        stats_dtype=stats_dtype,
    )


@dataclass
class _Gradients:
    """What the blocks of this rank add up to; None: not wanted.

    `features` [G, d] is that of what the logit map makes of the features, `bias` is [n, 1], and
    `scalars` [2] are those of the logarithm of the scale and of the offset.
    """

    features: Tensor | None = None
    rows: Tensor | None = None
    bias: Tensor | None = None
    scalars: Tensor | None = None

    @classmethod
    def like(cls, step: Step, agreed: Agreed, parameters: Parameters) -> "_Gradients":
        wanted = cls()
        learns_scale = parameters.log_scale is not None
        if agreed.needs_features or (agreed.needs_vectors and learns_scale):
            wanted.features = torch.zeros_like(step.features_Gd, dtype=step.stats_dtype)
        if agreed.needs_vectors:
            wanted.rows = step.gradient_like(step.rows)
            wanted.bias = None if step.bias is None else step.gradient_like(step.bias)
            if learns_scale or parameters.offset is not None:
                wanted.scalars = step.features_Gd.new_zeros(2, dtype=step.stats_dtype)
        return wanted


def _gradients(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the rows' features and of the parameters, summed over ranks (collective).

    A gradient is None if none of the ranks that contribute to it requires it.
    """
    step: Step = ctx.step
    engine: Engine = ctx.engine
    agreed: Agreed = ctx.call.agreed
    ctx.saved_tensors  # noqa: B018  raises where a saved tensor was changed in place
    if not (agreed.needs_features or agreed.needs_vectors):
        return (None,) * 5
    grad_parts = gradient_of_parts(engine.loss, list(ctx.parts), ctx.others, grad_loss)
    found = _Gradients.like(step, agreed, ctx.parameters)
    for index, (block, grad_stats) in enumerate(zip(ctx.blocks, grad_parts, strict=True)):
        _add_block_gradients(ctx, index, block, grad_stats, found)
    by_features = _of_features(ctx, found)
    by_vectors = _of_nodes(ctx, step.rows, found.rows)
    by_bias = _of_nodes(ctx, step.bias, found.bias)
    by_scalars = _of_scalars(ctx, found.scalars)
    return by_features, by_vectors, None if by_bias is None else by_bias.squeeze(1), *by_scalars


def _of_features(ctx: Any, found: _Gradients) -> Tensor | None:
    """The gradient of this rank's features (collective); adds to that of the scale."""
    if found.features is None:
        return None
    inputs: _Inputs = ctx.inputs
    grad = reduce_scatter_rows(found.features, ctx.call.agreed.sizes, ctx.engine.class_group)
    if found.scalars is not None:
        # The mapped features have the scale as a factor.
        found.scalars[0] += (grad * inputs.mapped()).sum()
    return inputs.gradient(grad) if ctx.call.agreed.needs_features else None


def _of_nodes(ctx: Any, values: NodeValues | None, grad_rows: Tensor | None) -> Tensor | None:
    """The gradient of what the nodes hold, of that of its sums along paths (collective)."""
    if values is None or grad_rows is None:
        return None
    engine: Engine = ctx.engine
    engine.weights.sum_gradients(grad_rows, engine.class_group)
    if ctx.call.over_data:
        all_reduce_sum(grad_rows, engine.data_group)
    return grad_rows.to(values.held.dtype)


def _of_scalars(ctx: Any, grad_scalars: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the logarithm of the scale and of the offset (collective)."""
    if grad_scalars is None:
        return None, None
    all_reduce_sum(grad_scalars, ctx.engine.class_group)
    if ctx.call.over_data:
        all_reduce_sum(grad_scalars, ctx.engine.data_group)
    _, _, *learned = ctx.parameters
    by_scale, by_offset = (
        None if each is None else grad.to(each.dtype)
        for each, grad in zip(learned, grad_scalars, strict=True)
    )
    return by_scale, by_offset


def _add_block_gradients(
    ctx: Any, index: int, block: ClassBlock, grad_stats: Stats, found: _Gradients
) -> None:
    """Add a block's part to what all blocks share, and write that of its rows and of its bias."""
    step: Step = ctx.step
    kept: Kept = ctx.kept
    if kept.graphs:
        work = kept.works[index]
    else:
        work = step.work(block, kept.logits(step, block, index), with_graph=True)
    grad_GC = work.gradient_of_logits(grad_stats)
    if found.bias is not None or found.scalars is not None:
        _add_shift_gradients(step, block, grad_GC.sum(0), found)
    if step.margins is not None:
        by_scale = step.margins.through(grad_GC, work.view.label_places)
        if found.scalars is not None:
            found.scalars[0] += by_scale
    grad_GC = grad_GC.to(step.compute_dtype)
    if found.features is not None:
        _add_product(found.features, grad_GC, step.class_rows(block))
    if found.rows is not None:
        _put_product(step, block, grad_GC, found.rows)


def _add_shift_gradients(step: Step, block: ClassBlock, grad_C: Tensor, found: _Gradients) -> None:
    """Of what is added to the logits of the block's classes: their bias and the offset."""
    if found.bias is not None:
        step.weights.put_gradient(block, grad_C.unsqueeze(1), found.bias)
    if found.scalars is not None:
        found.scalars[1] += grad_C.sum()


def _put_product(step: Step, block: ClassBlock, grad_logits: Tensor, grad_held: Tensor) -> None:
    """Write the gradient of a block's rows into `grad_held`."""
    target = None if step.logit_map.normalizes else step.weights.place_of(block, grad_held)
    if target is not None and target.dtype == grad_logits.dtype:
        # Written directly, without a second K x d tensor.
        torch.mm(grad_logits.T, step.features_Gd, out=target)
    else:
        grad_rows = step.gradient_of_rows(block, grad_logits.T @ step.features_Gd)
        step.weights.put_gradient(block, grad_rows, grad_held)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _fits(features: Tensor, labels: Tensor, held: Tensor, row_weights: Tensor | None) -> bool:
    """Features are floats [b, d] for vectors [n, d], labels integers [b], weights finite floats [b]
    of 0 or more, all on one device."""
    shapes = features.shape == (*labels.shape, held.shape[1]) and labels.dim() == 1
    together = features.device == labels.device == held.device
    fits = is_integral(labels) and shapes and features.is_floating_point() and together
    if row_weights is None or not fits:
        return fits
    if row_weights.shape != labels.shape or row_weights.device != labels.device:
        return False
    sound = (row_weights >= 0) & row_weights.isfinite()
    total = row_weights.sum()
    return row_weights.is_floating_point() and bool(sound.all() & total.isfinite())


def _described(row_weights: Tensor | None) -> str:
    if row_weights is None:
        return ""
    kind = f"{list(row_weights.shape)} of {row_weights.dtype} on {row_weights.device}"
    return f" and row weights {kind}"


def _code(dtype: torch.dtype, *, weighted: bool) -> int:
    """A number that tells apart the types of features, and whether rows come with weights."""
    return 2 * sum(ord(letter) << place for place, letter in enumerate(str(dtype))) + weighted
