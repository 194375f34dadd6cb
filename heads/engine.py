"""The exact, memory-bounded, class-sharded loss of a head: one autograd Function for every loss.

Forward walks this rank's classes in blocks and keeps only their statistics, merged over blocks,
then over ranks. Backward differentiates the value of the total with respect to each block's
statistics (tiny tensors) and walks the blocks again to turn those into gradients of features and
weights.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
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
from heads.losses import Block, Choice, Loss, Rows, Stats
from heads.weights import ClassBlock, ClassWeights

# glibc maps and clears larger pieces anew each time, at a page fault every 4 KiB.
_CACHED_BYTES = 16 << 20


@dataclass(frozen=True)
class Engine:
    """How one head computes: its weights' plan, its loss and its process groups.

    `class_group` shares the classes, `data_group` holds the same classes on other rows; None is one
    process. `memory_bytes` bounds what is held for logits at one time. A row weighs
    `class_weights` [K] of its label (None: 1), and nothing where the label is `ignore_index`.
    """

    weights: ClassWeights
    loss: Loss
    class_group: ProcessGroup | None
    data_group: ProcessGroup | None
    memory_bytes: int
    class_weights: Tensor | None = None
    ignore_index: int | None = None

    def __call__(
        self, features: Tensor, labels: Tensor, held: Tensor, draw: int | None = None
    ) -> Tensor:
        """The loss of the global batch, the same scalar on every rank.

        `features` [b, d] and `labels` [b] are this rank's rows, b may differ and be 0; `held` are
        this rank's node vectors [n, d]. The gradients of both are those of the global-mean loss:
        that of `held` is complete, that of `features` is complete for these rows. `draw` as in
        `Loss.choose`.

        Raises, on every rank, ValueError where a label of any rank is outside the classes or
        features and labels of any rank do not fit, FloatingPointError where the loss is NaN.
        """
        sizes, num_rows = self.exchange_sizes(features, labels, held)
        with_grad = torch.is_grad_enabled()  # inside the Function it always reads as off
        loss: Tensor = _HeadLoss.apply(
            features, held, labels.long(), self, sizes, num_rows, with_grad, draw
        )
        if loss.isnan():
            raise FloatingPointError(_not_a_number(features, held))
        return loss

    def to(self, device: torch.device) -> "Engine":
        """The same engine for vectors on another device."""
        constants = self.class_weights
        return replace(
            self,
            weights=self.weights.again(self.weights.tree, device),
            loss=self.loss.to(device),
            class_weights=None if constants is None else constants.to(device),
        )

    def counts(self, labels: Tensor) -> Tensor:
        """Which rows count at all, bool [b]."""
        if self.ignore_index is None:
            return torch.ones_like(labels, dtype=torch.bool)
        return labels != self.ignore_index

    def row_weights(self, labels: Tensor) -> Tensor:
        """What each row weighs [b], of labels that `exchange_sizes` has checked."""
        counts = self.counts(labels)
        if self.class_weights is None:
            return counts.to(torch.float32)
        return torch.where(counts, self.class_weights[torch.where(counts, labels, 0)], 0)

    def classes_at_once(self, num_rows: int, dim: int, itemsize: int) -> int:
        """Classes a block: their logits take an eighth of the budget, a few temporaries of that
        size fit, and a quarter is left for logits that are kept.

        A power of two, so that a batch that is a row longer does not cut the classes anew.
        """
        piece = self.memory_bytes // 8
        if self.weights.device.type == "cpu":
            piece = min(piece, _CACHED_BYTES)
        fitting = piece // (itemsize * max(num_rows, 1 if self.weights.is_plain else dim))
        return 1 << max(6, fitting.bit_length() - 1)

    def exchange_sizes(
        self, features: Tensor, labels: Tensor, held: Tensor
    ) -> tuple[list[int], list[int]]:
        """Rows of each rank of the class group, and of each class group along `data` (collective).

        What is wrong on one rank travels along, so that all of them raise and none is left waiting.
        """
        num_classes = self.weights.tree.num_classes
        num_counting = outside = 0
        if fits := _fits(features, labels, held):
            counts = self.counts(labels)
            num_counting = int(counts.sum())
            outside = int((((labels < 0) | (labels >= num_classes)) & counts).sum())
        num_rows = len(labels) if fits else 0
        tree = self.weights.tree_digest
        numbers = [num_rows, num_counting, outside, not fits, tree]
        mine = torch.tensor(numbers, dtype=torch.int64, device=held.device)
        group_ranks = torch.stack(all_gather_equal(mine, self.class_group))
        groups = torch.stack(all_gather_equal(group_ranks.sum(0), self.data_group))
        sizes, *_, trees = group_ranks.T.tolist()
        group_sizes, counting, outsides, misfits, group_trees = groups.T.tolist()
        if len({*trees}) > 1 or len({*group_trees}) > 1:
            raise ValueError(
                f"the ranks' label trees differ ({tree:08x} on this rank): give every rank the "
                "same tree, as a file that one of them built"
            )
        if any(misfits):
            raise ValueError(
                f"features {list(features.shape)} of {features.dtype} on {features.device} and "
                f"labels {list(labels.shape)} of {labels.dtype} on {labels.device}"
                f"{'' if fits else ' do not fit'}, {sum(misfits)} ranks do not fit: give floats "
                f"[b, {held.shape[1]}], the bias column included, and b integers, on {held.device}"
            )
        if any(outsides):
            raise ValueError(
                f"{sum(outsides)} labels are outside 0..{num_classes - 1}, {outside} of them on "
                "this rank: the data and the head disagree on the classes"
            )
        if not any(counting):
            raise ValueError("the global batch has no rows that count: give the head at least one")
        return sizes, group_sizes


@dataclass
class _Step:
    """What one call of the engine computes with, on every row of the class group (G of them).

    `labels_m` are those of the global batch's rows that count, m of them, and `counts` says which
    rows those are.
    """

    engine: Engine
    features_Gd: Tensor
    held: Tensor
    boundary: Tensor
    labels_G: Tensor
    labels_m: Tensor
    counts: Tensor
    choice: Choice | None
    compute_dtype: torch.dtype
    stats_dtype: torch.dtype

    @classmethod
    def gathered(
        cls,
        engine: Engine,
        features: Tensor,
        held: Tensor,
        labels: Tensor,
        sizes: list[int],
        world_rows: list[int],
        draw: int | None,
    ) -> "_Step":
        device = features.device.type
        autocast = torch.is_autocast_enabled(device)
        compute_dtype = torch.get_autocast_dtype(device) if autocast else features.dtype
        labels_G = all_gather_rows(labels, sizes, engine.class_group)
        labels = all_gather_rows(labels_G, world_rows, engine.data_group)
        counts = engine.counts(labels)
        return cls(
            engine=engine,
            features_Gd=all_gather_rows(features.to(compute_dtype), sizes, engine.class_group),
            held=held,
            boundary=engine.weights.fetch_boundary(held, engine.class_group),
            # A row that does not count has any class: its gradient is zero.
            labels_G=torch.where(engine.counts(labels_G), labels_G, 0),
            labels_m=labels[counts],
            counts=counts,
            choice=engine.loss.choose(engine.weights.held, labels[counts], draw),
            compute_dtype=compute_dtype,
            stats_dtype=torch.promote_types(compute_dtype, torch.float32),
        )

    def blocks(self) -> list[ClassBlock]:
        rows, dim = self.features_Gd.shape
        at_once = self.engine.classes_at_once(rows, dim, self.stats_dtype.itemsize)
        return list(self.engine.weights.blocks(at_once, self.choice))

    def class_rows(self, block: ClassBlock) -> Tensor:
        rows = self.engine.weights.rows(block, self.held, self.boundary)
        return rows.to(self.compute_dtype)

    def logits(self, block: ClassBlock, out: Tensor | None) -> Tensor:
        """[G, C], made in the first numbers of a flat `out` where there is one."""
        shape = len(self.features_Gd), len(block.class_ids)
        place = None if out is None else out[: math.prod(shape)].view(shape)
        return torch.mm(self.features_Gd, self.class_rows(block).T, out=place)

    def work(self, block: ClassBlock, logits: Tensor, *, with_graph: bool) -> "_BlockWork":
        leaf = logits.to(self.stats_dtype).requires_grad_(with_graph)
        columns = self.engine.weights.columns(block, self.labels_G)
        view = Block.of(block.class_ids, self.labels_G, columns, leaf, block.weights)
        with torch.set_grad_enabled(with_graph):
            stats = self.engine.loss.statistics(leaf, view)
        return _BlockWork(leaf, view, stats)

    def identity(self) -> Stats:
        like = self.features_Gd.new_empty(len(self.features_Gd), dtype=self.stats_dtype)
        return self.engine.loss.identity(like)


@dataclass(frozen=True)
class _BlockWork:
    """A block of classes computed: its logits, as a leaf, and their statistics."""

    leaf_GC: Tensor
    view: Block
    stats: Stats

    def gradient_of_logits(self, grad_stats: Stats) -> Tensor:
        # Class ids among the statistics have no gradient.
        pairs = [(s, g) for s, g in zip(self.stats, grad_stats, strict=True) if s.requires_grad]
        outputs, grads = zip(*pairs, strict=True)
        leaves = (self.leaf_GC, self.view.true)
        grad, by_true = torch.autograd.grad(
            outputs, leaves, grads, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        rows, _ = self.view.label_places
        # The gradient of a plain sum comes expanded: it is made whole before it is written to.
        return grad.contiguous().index_put_(self.view.label_places, by_true[rows], accumulate=True)


class _Kept:
    """What fits the budget and backward need not compute again: the graphs of all blocks, or else
    the logits of the first ones.

    Logits and statistics are made in place, so that all that a block allocates is gone before the
    next one: between what lasts, the holes that it leaves would be too small for the next by the
    few bytes of their alignment (sourceware bug 14581), and the heap would grow with every block.
    """

    def __init__(self, step: _Step, blocks: list[ClassBlock], *, with_grad: bool) -> None:
        sizes = [len(step.features_Gd) * len(block.class_ids) for block in blocks]
        budget = step.engine.memory_bytes if with_grad else 0
        # A graph holds its logits and about twice as much besides; then nothing else is kept.
        self.graphs = 3 * sum(sizes) * step.stats_dtype.itemsize <= budget // 2
        self.works: list[_BlockWork] = []
        ends = np.cumsum(sizes, dtype=np.int64)
        self._num = int((ends * step.compute_dtype.itemsize <= budget // 4).sum())
        self._starts = [0, *ends.tolist()]
        if not self.graphs:
            size = self._starts[self._num] + max(sizes[self._num :], default=0)
            self._buffer = step.features_Gd.new_empty(size)

    def place(self, index: int) -> Tensor | None:
        """Where a block's logits are made; None: anywhere."""
        return None if self.graphs else self._buffer[self._starts[min(index, self._num)] :]

    def logits(self, step: _Step, block: ClassBlock, index: int) -> Tensor:
        """A block's logits [G, C] in backward, made again where they were not kept."""
        place = self.place(index)
        if index >= self._num or place is None:
            return step.logits(block, place)
        shape = len(step.features_Gd), len(block.class_ids)
        return place[: math.prod(shape)].view(shape)


class _Parts:
    """The statistics of a rank's blocks, each copied into one tensor for all of them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._columns: Stats = ()

    def put(self, index: int, stats: Stats) -> None:
        if not self._columns:
            self._columns = tuple(stat.new_empty((self.num_blocks, *stat.shape)) for stat in stats)
        for column, stat in zip(self._columns, stats, strict=True):
            column[index] = stat.detach()

    def __iter__(self) -> Iterator[Stats]:
        return zip(*self._columns, strict=True) if self._columns else iter(())


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        held: Tensor,
        labels: Tensor,
        engine: Engine,
        sizes: list[int],
        world_rows: list[int],
        with_grad: bool,
        draw: int | None,
    ) -> Tensor:
        step = _Step.gathered(engine, features, held, labels, sizes, world_rows, draw)
        with_grad = with_grad and any(ctx.needs_input_grad)
        with torch.autocast(features.device.type, enabled=False):
            blocks = step.blocks()
            kept, parts = _Kept(step, blocks, with_grad=with_grad), _Parts(len(blocks))
            for index, block in enumerate(blocks):
                logits = step.logits(block, kept.place(index))
                work = step.work(block, logits, with_graph=kept.graphs)
                parts.put(index, work.stats)
                if kept.graphs:
                    kept.works.append(work)
                del logits, work
            mine = engine.loss.merge(list(parts)) if blocks else step.identity()
            others = _Others.gather(step, mine, world_rows)
            loss = others.value(mine)
        ctx.step, ctx.blocks, ctx.parts, ctx.others, ctx.kept = step, blocks, parts, others, kept
        ctx.sizes, ctx.feature_dtype, ctx.held_dtype = sizes, features.dtype, held.dtype
        # Kept for their version counters: a weight changed in place before backward is an error.
        ctx.save_for_backward(features, held)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("the head has no second derivative: leave create_graph out")
        # As in forward, whatever the caller's backward runs under: precisions are chosen here.
        with torch.autocast(grad_loss.device.type, enabled=False):
            return *_gradients(ctx, grad_loss), *(None,) * 6


def _gradients(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor]:
    """Of the rows' features and of the held vectors, all ranks' parts summed (collective)."""
    step: _Step = ctx.step
    engine, weights = step.engine, step.engine.weights
    ctx.saved_tensors  # noqa: B018  raises where a saved tensor was changed in place
    grad_parts = _gradient_of_parts(engine.loss, list(ctx.parts), ctx.others, grad_loss)
    # Weight gradients are accumulated in at least float32 whatever the products are made in.
    grad_held = weights.gradient_like(step.held, step.stats_dtype, every_class=step.choice is None)
    grad_features = torch.zeros_like(step.features_Gd, dtype=step.stats_dtype)
    for index, (block, grad_stats) in enumerate(zip(ctx.blocks, grad_parts, strict=True)):
        _add_block_gradients(ctx, index, block, grad_stats, grad_features, grad_held)
    weights.sum_gradients(grad_held, engine.class_group)
    all_reduce_sum(grad_held, engine.data_group)
    grad_features = reduce_scatter_rows(grad_features, ctx.sizes, engine.class_group)
    return grad_features.to(ctx.feature_dtype), grad_held.to(ctx.held_dtype)


def _add_block_gradients(
    ctx: Any,
    index: int,
    block: ClassBlock,
    grad_stats: Stats,
    grad_features: Tensor,
    grad_held: Tensor,
) -> None:
    """Add a block's part to the features' gradient, and put that of its rows in place."""
    step: _Step = ctx.step
    kept: _Kept = ctx.kept
    weights = step.engine.weights
    if kept.graphs:
        work = kept.works[index]
    else:
        work = step.work(block, kept.logits(step, block, index), with_graph=True)
    grad_logits = work.gradient_of_logits(grad_stats).to(step.compute_dtype)
    _add_product(grad_features, grad_logits, step.class_rows(block))
    target = weights.place_of(block, grad_held)
    if target is not None and target.dtype == grad_logits.dtype:
        # Straight into its place: no second K x d.
        torch.mm(grad_logits.T, step.features_Gd, out=target)
    else:
        weights.put_gradient(block, grad_logits.T @ step.features_Gd, grad_held)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


@dataclass(frozen=True)
class _Others:
    """Statistics of the other ranks, constants to this one, and where its own fit among them."""

    loss: Loss
    class_parts: list[Stats]
    class_rank: int
    data_totals: list[Stats]
    data_rank: int
    counts: Tensor | None
    rows: Rows

    @classmethod
    def gather(cls, step: _Step, mine: Stats, world_rows: list[int]) -> "_Others":
        engine = step.engine
        class_parts = _gather_stats(mine, all_gather_equal, engine.class_group)
        total = engine.loss.merge(class_parts)
        data_totals = _gather_stats(total, _uneven(world_rows), engine.data_group)
        weights = engine.row_weights(step.labels_m).to(step.stats_dtype)
        return cls(
            loss=engine.loss,
            class_parts=class_parts,
            class_rank=group_rank(engine.class_group),
            data_totals=data_totals,
            data_rank=group_rank(engine.data_group),
            counts=None if engine.ignore_index is None else step.counts,
            rows=Rows(
                num_classes=engine.weights.tree.num_classes,
                labels=step.labels_m,
                weights=None if engine.class_weights is None else weights,
            ),
        )

    def value(self, mine: Stats) -> Tensor:
        """The loss of the global batch as a function of this rank's own statistics."""
        class_parts = [*self.class_parts]
        class_parts[self.class_rank] = mine
        data_totals = [*self.data_totals]
        data_totals[self.data_rank] = self.loss.merge(class_parts)
        total = tuple(torch.cat(column) for column in zip(*data_totals, strict=True))
        if self.counts is not None:
            total = tuple(stat[self.counts] for stat in total)
        return self.loss.value(total, self.rows)


def _fits(features: Tensor, labels: Tensor, held: Tensor) -> bool:
    """Features are floats [b, d] for vectors [n, d], labels integers [b], all on one device."""
    integral = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    shapes = features.shape == (*labels.shape, held.shape[1]) and labels.dim() == 1
    together = features.device == labels.device == held.device
    return integral and shapes and features.is_floating_point() and together


def _not_a_number(features: Tensor, held: Tensor) -> str:
    rows = int((~features.isfinite().all(1)).sum())
    vectors = int((~held.isfinite().all(1)).sum())
    return (
        f"the loss is NaN; on this rank {rows} of {len(features)} rows of features and "
        f"{vectors} of {len(held)} weight vectors are not finite: lower the learning rate, or look "
        "at the inputs"
    )


def _gradient_of_parts(
    loss: Loss, parts: Sequence[Stats], others: _Others, grad_loss: Tensor
) -> list[Stats]:
    """The gradient of the loss with respect to the statistics of each of this rank's blocks."""
    if not parts:
        return []
    leaves = [tuple(stat.detach().requires_grad_() for stat in part) for part in parts]
    with torch.enable_grad():
        value = others.value(loss.merge(leaves))
    flat = [stat for part in leaves for stat in part]
    grads = torch.autograd.grad(
        value, flat, grad_loss.to(value.dtype), allow_unused=True, materialize_grads=True
    )
    width = len(leaves[0])
    return [tuple(grads[i : i + width]) for i in range(0, len(grads), width)]


def _gather_stats(
    stats: Stats, gather: Callable[[Tensor, ProcessGroup | None], list[Tensor]], group: Any
) -> list[Stats]:
    """All ranks' statistics, sent as one [rows, width] tensor."""
    widths = [math.prod(stat.shape[1:]) for stat in stats]
    columns = [stat.reshape(-1, width) for stat, width in zip(stats, widths, strict=True)]
    packed = torch.cat(columns, dim=1)
    return [
        tuple(
            part.reshape(len(part), *stat.shape[1:])
            for part, stat in zip(gathered.split(widths, dim=1), stats, strict=True)
        )
        for gathered in gather(packed, group)
    ]


def _uneven(sizes: list[int]) -> Callable[[Tensor, ProcessGroup | None], list[Tensor]]:
    def gather(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
        return list(all_gather_rows(tensor, sizes, group).split(sizes))

    return gather
