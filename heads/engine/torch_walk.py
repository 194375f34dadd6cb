"""The walk over a rank's classes with torch operations, on any device."""

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from heads.engine.block_size import saved_blocks
from heads.engine.blockwise import BlockwiseLogits, GradientSums
from heads.losses import Block, LabelPositions, Stats
from heads.weights import ClassBlock

# Shape legend: G rows of the class group, C classes of a block, d features.


@dataclass(frozen=True)
class ComputedBlock:
    """A block of classes: its logits, as an autograd leaf, and their statistics."""

    leaf_GC: Tensor
    view: Block
    stats: Stats

    def gradient_of_logits(self, outputs: Stats, grads: Stats) -> Tensor:
        """Convert the gradients of `outputs`, functions of the logits, to that of the logits."""
        # Some statistics are class IDs, which do not require a gradient.
        pairs = [(s, g) for s, g in zip(outputs, grads, strict=True) if s.requires_grad]
        sources, grads = zip(*pairs, strict=True)
        leaves = (self.leaf_GC, self.view.true)
        grad, by_true = torch.autograd.grad(
            sources, leaves, grads, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        # The gradient of a plain sum is an expanded view, which cannot be written to.
        return self.view.positions.add(grad.contiguous(), by_true)


class TorchWalk:
    """The statistics of a rank's classes, computed block by block, and the gradients.

    `with_graph` is true if `add_gradients` will be called.
    """

    def __init__(self, logits: BlockwiseLogits, *, with_graph: bool) -> None:
        self._logits, self._with_graph = logits, with_graph
        self.blocks = logits.blocks()
        self._saved = SavedBlocks(logits, self.blocks, with_grad=with_graph)
        self._of_blocks: list[Stats] = []

    def statistics(self) -> list[Stats]:
        """Return the statistics of each block; an empty list for a rank without classes.

        They are leaves of an autograd graph. If there is only one block and its graph is saved,
        they are the outputs of that graph.
        """
        logits, saved = self._logits, self._saved
        if logits.margins is not None and self.blocks:
            logits.true_logits(logits.true_vectors()[1])
        statistics = _BlockStatistics(len(self.blocks))
        for index, block in enumerate(self.blocks):
            logits_GC = self._logits_of(block, saved.buffer(index))
            computed = self._reduced(block, logits_GC, with_graph=saved.graphs)
            statistics.put(index, computed.stats)
            saved.save(computed)
            del computed, logits_GC  # free them before computing the next block
        self._of_blocks = statistics.of_blocks(with_graph=self._with_graph)
        return self._of_blocks

    def add_gradients(self, loss: Tensor, grad_loss: Tensor, to: GradientSums) -> None:
        """Add the gradients of `loss`, a function of `statistics`, to `to`."""
        if any(not stat.is_leaf for stats in self._of_blocks for stat in stats):
            # Call autograd once instead of twice. With few classes, this matters.
            block, computed = self.blocks[0], self._saved.graph(0)
            self._add_block(block, computed, computed.gradient_of_logits((loss,), (grad_loss,)), to)
            return
        grads = _gradients_of_blocks(loss, grad_loss, self._of_blocks)
        for index, block in enumerate(self.blocks):
            computed = self._load(index, block)
            grad_GC = computed.gradient_of_logits(computed.stats, grads[index])
            self._add_block(block, computed, grad_GC, to)
            del computed, grad_GC

    def _logits_of(self, block: ClassBlock, out: Tensor | None) -> Tensor:
        """Compute the logits [G, C] without margins, in the first elements of `out` if given."""
        logits = self._logits
        target = None if out is None else self._view(block, out)
        rows_Cd, shift_C = logits.class_rows(block), logits.shift(block)
        return logits.product(logits.features_Gd, rows_Cd.T, add=shift_C, out=target)

    def _view(self, block: ClassBlock, buffer: Tensor) -> Tensor:
        shape = len(self._logits.features_Gd), len(block.class_ids)
        return buffer[: math.prod(shape)].view(shape)

    def _reduced(self, block: ClassBlock, logits_GC: Tensor, *, with_graph: bool) -> ComputedBlock:
        """Compute a block's statistics, with an autograd graph if `with_graph`."""
        logits = self._logits
        columns = logits.weights.columns(block, logits.labels_P)
        labels = LabelPositions.of(columns, len(block.class_ids), logits.row_of_label)
        if logits.margins is not None:
            labels.put(logits_GC, logits.margins.logits)
        logits_GC.requires_grad_(with_graph)
        view = Block.of(block.class_ids, logits.labels_P, labels, logits_GC, block.weights)
        with torch.set_grad_enabled(with_graph):
            stats = logits.loss.statistics(logits_GC, view)
        return ComputedBlock(logits_GC, view, stats)

    def _load(self, index: int, block: ClassBlock) -> ComputedBlock:
        """Return a block with its graph."""
        buffer = self._saved.buffer(index)
        if buffer is None:
            return self._saved.graph(index)
        is_saved = self._saved.has_logits(index)
        logits_GC = self._view(block, buffer) if is_saved else self._logits_of(block, buffer)
        return self._reduced(block, logits_GC, with_graph=True)

    def _add_block(
        self, block: ClassBlock, computed: ComputedBlock, grad_GC: Tensor, to: GradientSums
    ) -> None:
        """Add the block's terms to the sums over classes, and write the gradient of its rows."""
        logits = self._logits
        if to.bias is not None or to.scalars is not None:
            logits.add_shift_gradient(block, grad_GC.sum(0), to)
        if logits.margins is not None:
            positions = computed.view.positions
            by_true, by_scale = logits.margins.through(positions.take(grad_GC))
            positions.put(grad_GC, by_true)
            if to.scalars is not None:
                to.scalars[0] += by_scale
        grad_GC = grad_GC.to(logits.compute_dtype)
        if to.needs_features:
            logits.add_feature_gradient(grad_GC, logits.class_rows(block), to)
        if to.rows is not None:
            logits.put_gradient_of_rows(block, grad_GC, to.rows)


def _gradients_of_blocks(loss: Tensor, grad_loss: Tensor, of_blocks: list[Stats]) -> list[Stats]:
    """Return the gradients of `loss` with respect to the statistics of each block."""
    if not of_blocks:
        return []
    flat = [stat for stats in of_blocks for stat in stats]
    grads = torch.autograd.grad(
        loss,
        flat,
        grad_loss,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    width = len(of_blocks[0])
    return [tuple(grads[i : i + width]) for i in range(0, len(grads), width)]


class SavedBlocks:
    """The tensors that forward saves for backward within the memory budget.

    Forward saves the graphs of all blocks if they fit, otherwise the logits of the first blocks.
    Backward recomputes the logits of the other blocks. For example, with budget M and 40 blocks
    whose logits take M / 32 each, eight are saved (a quarter of M) and 32 are recomputed.

    All logits are written to one buffer and all statistics to another (`_BlockStatistics`), so that
    everything else that a block allocates is freed before the next block. Otherwise, small
    long-lived tensors between these allocations would leave gaps a few bytes too small for the next
    block's aligned allocation, and the heap would grow with every block (sourceware bug 14581).
    """

    def __init__(
        self, logits: BlockwiseLogits, blocks: list[ClassBlock], *, with_grad: bool
    ) -> None:
        sizes = [len(logits.features_Gd) * len(block.class_ids) for block in blocks]
        budget = logits.memory_bytes if with_grad else 0
        itemsize = logits.stats_dtype.itemsize
        self.graphs, self._num = saved_blocks(sizes, itemsize, budget)
        self._computed: list[ComputedBlock] = []
        if self.graphs:
            return
        self._starts = list(accumulate(sizes, initial=0))
        size = self._starts[self._num] + max(sizes[self._num :], default=0)
        self._buffer = logits.features_Gd.new_empty(size, dtype=logits.stats_dtype)

    def buffer(self, index: int) -> Tensor | None:
        """Return a flat tensor for the logits of a block, or None if graphs are saved.

        Blocks that are not saved share the end of the buffer.
        """
        return None if self.graphs else self._buffer[self._starts[min(index, self._num)] :]

    def save(self, computed: ComputedBlock) -> None:
        """Keep the graph of the next block if graphs are saved.

        If logits are saved instead, they are already in `buffer`.
        """
        if self.graphs:
            self._computed.append(computed)

    def graph(self, index: int) -> ComputedBlock:
        """Return a block with its graph, if graphs are saved."""
        return self._computed[index]

    def has_logits(self, index: int) -> bool:
        """Whether `buffer` still contains the logits of a block."""
        return index < self._num


class _BlockStatistics:
    """The statistics of a rank's blocks: one tensor per statistic, with one row per block.

    The statistics of a single block are kept as they are, with their autograd graph if forward
    recorded one.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._only: Stats = ()
        self._columns: Stats = ()

    def put(self, index: int, stats: Stats) -> None:
        if self.num_blocks == 1:
            self._only = stats
            return
        if not self._columns:
            self._columns = tuple(stat.new_empty((self.num_blocks, *stat.shape)) for stat in stats)
        for column, stat in zip(self._columns, stats, strict=True):
            column[index] = stat.detach()

    def of_blocks(self, *, with_graph: bool) -> list[Stats]:
        """Return the statistics of each block; if `with_graph`, they have an autograd graph or are
        leaves of one."""
        if any(stat.requires_grad for stat in self._only):
            return [self._only]
        blocks = [self._only] if self._only else zip(*self._columns, strict=True)
        return [tuple(stat.detach().requires_grad_(with_graph) for stat in each) for each in blocks]
