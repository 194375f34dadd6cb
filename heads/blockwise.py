"""Forward and backward of one block of classes: class rows -> logits -> statistics, and back.

`heads/engine.py` iterates over the blocks and merges their statistics over blocks and ranks; this
module computes a single block on one rank. Forward reduces the logits [G, C] to a few statistics
per row. Backward converts the gradient of the statistics to the gradient of the logits, and then,
with two matrix products, to the gradients of features and rows.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from heads.block_size import Processor
from heads.logits import LogitMap, Margins
from heads.losses import Block, Choice, LabelPositions, Loss, Stats
from heads.weights import ClassBlock, ClassWeights, NodeValues

# Shape legend: G rows of the class group, C classes of a block, d features, n nodes of this rank.


@dataclass
class BlockwiseLogits:
    """The logits of G rows for this rank's classes, computed one block at a time.

    `features_Gd` are the features after the logit map, multiplied by its scale. `rows` and `bias`
    contain one entry per node; `bias` is None if the head has no bias. `offset` and `log_prior` [K]
    are added to the logits. `margins` is None for a map without a margin. `memory_bytes` limits the
    memory used for logits. `processor` selects the code and the block sizes for a CPU or a GPU.
    `choice` contains the classes that the loss selected (None: all).
    """

    weights: ClassWeights
    loss: Loss
    logit_map: LogitMap
    memory_bytes: int
    processor: Processor
    features_Gd: Tensor
    labels_G: Tensor
    rows: NodeValues
    bias: NodeValues | None
    offset: Tensor | None
    log_prior: Tensor | None
    margins: Margins | None
    choice: Choice | None
    compute_dtype: torch.dtype
    stats_dtype: torch.dtype

    def set_margins(self) -> None:
        """Compute the true logits with their margin. Rows whose class another rank holds get
        arbitrary values."""
        if self.margins is None or not len(self.weights.held.class_ids):
            return
        # Recompute these few products in the precision of the statistics: the derivative of arccos
        # is large near +-1, so a margin amplifies the rounding errors of bf16 products.
        rows = self.weights.rows_of_labels(self.labels_G, self.rows)
        vectors = self.logit_map.normalized(rows).to(self.compute_dtype).to(self.stats_dtype)
        shifts: Tensor | float = 0.0
        if self.log_prior is not None:
            shifts = self.log_prior[self.labels_G].to(self.stats_dtype)
        if self.offset is not None:
            shifts = shifts + self.offset
        self.margins.set((self.features_Gd.to(self.stats_dtype) * vectors).sum(1), shifts)

    def blocks(self) -> list[ClassBlock]:
        return list(self.weights.blocks(self.classes_at_once(), self.choice))

    def classes_at_once(self) -> int:
        """Return the number of classes per block; see `Processor.classes_at_once`.

        The logits of a block use up to an eighth of the memory budget, and so does a copy of its
        class rows. The rest of the budget covers a few temporaries of that size and the logits
        saved for backward, which use a quarter of the budget.
        """
        rows, dim = self.features_Gd.shape
        itemsize = self.stats_dtype.itemsize
        column_bytes = max(rows, 1) * itemsize
        if self.logit_map.normalizes or not self.weights.is_plain:
            column_bytes = max(column_bytes, dim * itemsize)
        elif self.processor.kind == "cuda" and self.compute_dtype != self.stats_dtype:
            column_bytes = max(column_bytes, dim * self.compute_dtype.itemsize)
        return self.processor.classes_at_once(column_bytes, self.memory_bytes)

    # ------------------------------------------------------------------------ forward

    def compute(
        self, block: ClassBlock, *, out: Tensor | None, with_graph: bool
    ) -> "ComputedBlock":
        """Compute a block's statistics.

        If a flat tensor `out` is given, the logits are written to its first elements.
        `with_graph` records the autograd graph for backward.
        """
        rows_Cd, labels = self.class_rows(block), self.label_positions(block)
        logits_GC = self.logits(block, rows_Cd, out)
        del rows_Cd  # free the rows before computing the statistics
        return self._reduced(block, logits_GC, labels, with_graph=with_graph)

    def recompute(self, block: ClassBlock, logits_GC: Tensor) -> "ComputedBlock":
        """Recompute the statistics for backward, with a graph and the margins from forward."""
        return self._reduced(block, logits_GC, self.label_positions(block), with_graph=True)

    def class_rows(self, block: ClassBlock) -> Tensor:
        """Return the class rows [C, d], ready for the product with the features."""
        rows = self.logit_map.normalized(self.weights.rows(block, self.rows))
        return rows.to(self.compute_dtype)

    def label_positions(self, block: ClassBlock) -> LabelPositions:
        columns = self.weights.columns(block, self.labels_G)
        return LabelPositions.of(columns, len(block.class_ids))

    def logits(self, block: ClassBlock, rows_Cd: Tensor, out: Tensor | None) -> Tensor:
        """Compute the logits [G, C] without margins, in the first elements of `out` if given."""
        shape = len(self.features_Gd), len(block.class_ids)
        target = None if out is None else out[: math.prod(shape)].view(shape)
        shift_C = self._shift(block)
        return self._product(self.features_Gd, rows_Cd.T, add=shift_C, out=target)

    def _shift(self, block: ClassBlock) -> Tensor | None:
        """Return the sum [C] of bias, prior and offset, or None if there are none.

        It has the dtype of the logits.
        """
        terms = []
        if self.bias is not None:
            terms.append(self.weights.rows(block, self.bias).squeeze(1))
        if self.log_prior is not None:
            terms.append(self.log_prior[block.class_ids])
        if self.offset is not None:
            terms.append(self.offset.expand(len(block.class_ids)))
        terms = [term.to(self.stats_dtype) for term in terms]
        if len(terms) < 2:
            return terms[0] if terms else None
        return torch.stack(terms).sum(0)

    def _reduced(
        self, block: ClassBlock, logits_GC: Tensor, labels: LabelPositions, *, with_graph: bool
    ) -> "ComputedBlock":
        if self.margins is not None:
            labels.put(logits_GC, self.margins.logits)
        logits_GC.requires_grad_(with_graph)
        view = Block.at(block.class_ids, self.labels_G, labels, logits_GC, block.weights)
        with torch.set_grad_enabled(with_graph):
            stats = self.loss.statistics(logits_GC, view)
        return ComputedBlock(logits_GC, view, stats)

    def identity(self) -> Stats:
        """Return the statistics of a rank without classes."""
        like = self.features_Gd.new_empty(len(self.features_Gd), dtype=self.stats_dtype)
        return self.loss.identity(like)

    # ------------------------------------------------------------------------ backward

    def add_gradients(
        self,
        block: ClassBlock,
        computed: "ComputedBlock",
        outputs: Stats,
        grads: Stats,
        to: "GradientSums",
    ) -> None:
        """Add the block's terms to the sums over classes, and write the gradient of its rows.

        `outputs` are the block's statistics or a function of them, and `grads` their gradients.
        """
        grad_GC = computed.gradient_of_logits(outputs, grads)
        if to.bias is not None or to.scalars is not None:
            grad_C = grad_GC.sum(0)
            if to.bias is not None:
                self.weights.put_gradient(block, grad_C.unsqueeze(1), to.bias)
            if to.scalars is not None:
                to.scalars[1] += grad_C.sum()
        if self.margins is not None:
            by_scale = self.margins.through(grad_GC, computed.view.positions)
            if to.scalars is not None:
                to.scalars[0] += by_scale
        grad_GC = grad_GC.to(self.compute_dtype)
        if to.needs_features:
            rows_Cd = self.class_rows(block)
            to.features = self._product(grad_GC, rows_Cd, add=to.features, out=to.features)
        if to.rows is not None:
            self._write_gradient_of_rows(block, grad_GC, to.rows)

    def _write_gradient_of_rows(
        self, block: ClassBlock, grad_GC: Tensor, grad_nodes: Tensor
    ) -> None:
        target = None
        if not self.logit_map.normalizes:
            target = self.weights.contiguous_part(block, grad_nodes)
        # If possible, write to the gradient directly, without a second K x d tensor.
        grad_Cd = self._product(grad_GC.T, self.features_Gd, out=target)
        if target is not None:
            return
        if self.logit_map.normalizes:
            grad_Cd = self.logit_map.gradient(self.weights.rows(block, self.rows), grad_Cd)
        self.weights.put_gradient(block, grad_Cd, grad_nodes)

    def _product(
        self,
        left: Tensor,
        right: Tensor,
        *,
        add: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return `left` @ `right` (+ `add`) in the dtype of the statistics, written to `out` if
        given.

        The products of half-precision numbers are accumulated in float32, and the result is not
        rounded to half precision. `add` and `out` may be the same tensor.
        """
        options: dict[str, Any] = {"out": out}
        if left.dtype != self.stats_dtype:
            if self.processor.kind == "cuda":
                options["out_dtype"] = self.stats_dtype
            else:  # torch supports `out_dtype` on CUDA only
                left, right = left.to(self.stats_dtype), right.to(self.stats_dtype)
        if add is None:
            return torch.mm(left, right, **options)
        return torch.addmm(add, left, right, **options)

    def gradient_like(self, values: NodeValues) -> Tensor:
        """Create the buffer to which the blocks write the gradients of path sums.

        Its dtype is at least float32, even if the products are bf16.
        """
        every_class = self.choice is None
        return self.weights.gradient_like(values.held, self.stats_dtype, every_class=every_class)


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


class SavedBlocks:
    """The tensors that forward saves for backward within the memory budget.

    Forward saves the graphs of all blocks if they fit, otherwise the logits of the first blocks.
    Backward recomputes the logits of the other blocks. For example, with budget M and 10 blocks
    whose logits take M / 8 each, two blocks are saved (a quarter of M) and eight are recomputed.

    All logits are written to one buffer and all statistics to another (`BlockStatistics`), so that
    everything else that a block allocates is freed before the next block. Otherwise, small
    long-lived tensors between these allocations would leave gaps a few bytes too small for the next
    block's aligned allocation, and the heap would grow with every block (sourceware bug 14581).
    """

    def __init__(
        self, logits: BlockwiseLogits, blocks: list[ClassBlock], *, with_grad: bool
    ) -> None:
        sizes = [len(logits.features_Gd) * len(block.class_ids) for block in blocks]
        budget = logits.memory_bytes if with_grad else 0
        # A graph needs about three times the memory of its logits.
        self.graphs = 3 * sum(sizes) * logits.stats_dtype.itemsize <= budget // 2
        self._logits = logits
        self._computed: list[ComputedBlock] = []
        if self.graphs:
            return
        self._starts = list(accumulate(sizes, initial=0))
        itemsize = logits.stats_dtype.itemsize
        self._num = sum(end * itemsize <= budget // 4 for end in self._starts[1:])
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

    def load(self, index: int, block: ClassBlock) -> ComputedBlock:
        """Return a block with its graph, for backward."""
        if self.graphs:
            return self._computed[index]
        return self._logits.recompute(block, self._load_logits(index, block))

    def _load_logits(self, index: int, block: ClassBlock) -> Tensor:
        buffer, logits = self.buffer(index), self._logits
        assert buffer is not None
        if index >= self._num:
            return logits.logits(block, logits.class_rows(block), buffer)
        shape = len(logits.features_Gd), len(block.class_ids)
        return buffer[: math.prod(shape)].view(shape)


@dataclass
class GradientSums:
    """Buffers for the gradients of this rank's blocks (None: not required).

    `rows` [n, d] and `bias` [n, 1] are the gradients of path sums, and `scalars` [2] are the
    gradients of the logarithm of the scale and of the offset. `features` [G, d] is the gradient of
    the features after the logit map, if `needs_features`; the first block allocates it.
    """

    needs_features: bool = False
    features: Tensor | None = None
    rows: Tensor | None = None
    bias: Tensor | None = None
    scalars: Tensor | None = None
