"""One call of the engine on this rank: its classes in blocks, and what of them is kept.

It knows the losses' statistics and nothing of how they join over ranks.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from heads.logits import LogitMap
from heads.losses import Block, Choice, Loss, Stats
from heads.weights import ClassBlock, ClassWeights, NodeValues

# glibc maps and clears larger pieces anew each time, at a page fault every 4 KiB.
_CACHED_BYTES = 16 << 20

# Shape legend: G rows of the class group, C classes of a block, d features.


@dataclass
class Step:
    """What one call of the engine computes with, on every row of the class group (G of them).

    `features_Gd` are what the logit map makes of the features, times its scale; `rows` and `bias`
    (None: the head has none) are as the nodes hold them. `offset` and `log_prior` [K] are added to
    logits, `margins` is None for a map without margin. `memory_bytes` bounds what is held for
    logits, `choice` are the classes that the loss chose.
    """

    weights: ClassWeights
    loss: Loss
    logit_map: LogitMap
    memory_bytes: int
    features_Gd: Tensor
    labels_G: Tensor
    rows: NodeValues
    bias: NodeValues | None
    offset: Tensor | None
    log_prior: Tensor | None
    margins: "Margins | None"
    choice: Choice | None
    compute_dtype: torch.dtype
    stats_dtype: torch.dtype

    def blocks(self) -> list[ClassBlock]:
        return list(self.weights.blocks(self.classes_at_once(), self.choice))

    def classes_at_once(self) -> int:
        """Classes a block: their logits take an eighth of the budget, a few temporaries of that
        size fit, and a quarter is left for logits that are kept.

        A power of two, so that a batch that is a row longer does not cut the classes anew.
        """
        rows, dim = self.features_Gd.shape
        piece = self.memory_bytes // 8
        if self.features_Gd.device.type == "cpu":
            piece = min(piece, _CACHED_BYTES)
        whole_rows = self.logit_map.normalizes or not self.weights.is_plain
        widest = max(rows, dim if whole_rows else 1)
        fitting = piece // (self.stats_dtype.itemsize * widest)
        return 1 << max(6, fitting.bit_length() - 1)

    def class_rows(self, block: ClassBlock) -> Tensor:
        """What the product with the features is taken of, [C, d]."""
        rows = self.logit_map.normalized(self.weights.rows(block, self.rows))
        return rows.to(self.compute_dtype)

    def gradient_of_rows(self, block: ClassBlock, grad_Cd: Tensor) -> Tensor:
        """That of the sums of node vectors, of that of `class_rows`."""
        if not self.logit_map.normalizes:
            return grad_Cd
        return vjp(self.logit_map.normalized, self.weights.rows(block, self.rows), grad_Cd)

    def shift(self, block: ClassBlock) -> Tensor | None:
        """What is added to the product [C]; None: nothing."""
        terms = []
        if self.bias is not None:
            terms.append(self.weights.rows(block, self.bias).squeeze(1))
        if self.log_prior is not None:
            terms.append(self.log_prior[block.class_ids])
        if self.offset is not None:
            terms.append(self.offset.expand(len(block.class_ids)))
        if len(terms) < 2:
            return terms[0] if terms else None
        return torch.stack([term.to(self.stats_dtype) for term in terms]).sum(0)

    def logits(self, block: ClassBlock, rows_Cd: Tensor, out: Tensor | None) -> Tensor:
        """[G, C], made in the first numbers of a flat `out` where there is one."""
        shape = len(self.features_Gd), len(block.class_ids)
        place = None if out is None else out[: math.prod(shape)].view(shape)
        shift_C = self.shift(block)
        if shift_C is None:
            return torch.mm(self.features_Gd, rows_Cd.T, out=place)
        shift_C = shift_C.to(self.compute_dtype)
        return torch.addmm(shift_C, self.features_Gd, rows_Cd.T, out=place)

    def set_margins(self, block: ClassBlock, rows_Cd: Tensor) -> None:
        """Compute the true logits of the rows whose class is in the block, with their margin."""
        if self.margins is None:
            return
        rows, columns = places_of(self.weights.columns(block, self.labels_G), block)
        # One product per row, in the precision of statistics: a margin amplifies rounding errors.
        features, vectors = self.features_Gd[rows], rows_Cd[columns]
        products = (features.to(self.stats_dtype) * vectors.to(self.stats_dtype)).sum(1)
        shift_C = self.shift(block)
        shifts = 0.0 if shift_C is None else shift_C[columns].to(self.stats_dtype)
        self.margins.set(rows, products, shifts)

    def gradient_like(self, values: NodeValues) -> Tensor:
        """What the gradients of path sums are written to, block by block: in at least float32,
        whatever the products are made in."""
        every_class = self.choice is None
        return self.weights.gradient_like(values.held, self.stats_dtype, every_class=every_class)

    def work(self, block: ClassBlock, logits: Tensor, *, with_graph: bool) -> "BlockWork":
        leaf = logits.to(self.stats_dtype)
        columns = self.weights.columns(block, self.labels_G)
        if self.margins is not None:
            places = places_of(columns, block)
            leaf.index_put_(places, self.margins.logits[places[0]])
        leaf.requires_grad_(with_graph)
        view = Block.of(block.class_ids, self.labels_G, columns, leaf, block.weights)
        with torch.set_grad_enabled(with_graph):
            stats = self.loss.statistics(leaf, view)
        return BlockWork(leaf, view, stats)

    def identity(self) -> Stats:
        like = self.features_Gd.new_empty(len(self.features_Gd), dtype=self.stats_dtype)
        return self.loss.identity(like)


class Margins:
    """The true logits of G rows with their margin, and their derivatives.

    `slopes` are those with respect to the logit without margin. `excess` is what the margin adds to
    the derivative with respect to the logarithm of the scale.
    """

    def __init__(
        self, logit_map: LogitMap, scale: Tensor | float, *, eps: float, like: Tensor
    ) -> None:
        self._map, self._scale, self._eps = logit_map, scale, eps
        self.logits, self.slopes, self.excess = (torch.zeros_like(like) for _ in range(3))

    def set(self, rows: Tensor, products: Tensor, shifts: Tensor | float) -> None:
        """The logits of `rows` [n], of scaled cosines [n] and what is added to them."""
        with torch.enable_grad():
            cosines = (products / self._scale).requires_grad_()
            replaced = self._map.with_margin(cosines, self._eps)
        (slopes,) = torch.autograd.grad(replaced, cosines, torch.ones_like(replaced))
        scaled = self._scale * replaced.detach()
        self.logits[rows] = scaled + shifts
        self.slopes[rows] = slopes
        self.excess[rows] = scaled - slopes * products

    def through(self, grad_GC: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        """Turn the gradient of the logits, in place, into that of logits without margins. Returns
        what the margins add to the gradient of the logarithm of the scale, a scalar."""
        rows, _ = places
        by_true = grad_GC[places]
        grad_GC.index_put_(places, by_true * self.slopes[rows])
        return (by_true * self.excess[rows]).sum()


def places_of(columns: Tensor, block: ClassBlock) -> tuple[Tensor, Tensor]:
    """The (rows, columns) of the labels that are in the block, of their `columns` [G]."""
    rows = ((columns >= 0) & (columns < len(block.class_ids))).nonzero().squeeze(1)
    return rows, columns[rows]


def vjp(function: Callable[[Tensor], Tensor], vectors: Tensor, grad: Tensor) -> Tensor:
    """The gradient of `vectors`, of that of `function(vectors)`."""
    with torch.enable_grad():
        leaf = vectors.detach().requires_grad_()
        result = function(leaf)
    (grad_vectors,) = torch.autograd.grad(result, leaf, grad.to(result.dtype))
    return grad_vectors


@dataclass(frozen=True)
class BlockWork:
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


class Kept:
    """What fits the budget and backward need not compute again: the graphs of all blocks, or else
    the logits of the first ones.

    Logits and statistics are made in place, so that all that a block allocates is gone before the
    next one: between what lasts, the holes that it leaves would be too small for the next by the
    few bytes of their alignment (sourceware bug 14581), and the heap would grow with every block.
    """

    def __init__(self, step: Step, blocks: list[ClassBlock], *, with_grad: bool) -> None:
        sizes = [len(step.features_Gd) * len(block.class_ids) for block in blocks]
        budget = step.memory_bytes if with_grad else 0
        # A graph holds its logits and about twice as much besides; then nothing else is kept.
        self.graphs = 3 * sum(sizes) * step.stats_dtype.itemsize <= budget // 2
        self.works: list[BlockWork] = []
        ends = np.cumsum(sizes, dtype=np.int64)
        self._num = int((ends * step.compute_dtype.itemsize <= budget // 4).sum())
        self._starts = [0, *ends.tolist()]
        if not self.graphs:
            size = self._starts[self._num] + max(sizes[self._num :], default=0)
            self._buffer = step.features_Gd.new_empty(size)

    def place(self, index: int) -> Tensor | None:
        """Where a block's logits are made; None: anywhere."""
        return None if self.graphs else self._buffer[self._starts[min(index, self._num)] :]

    def logits(self, step: Step, block: ClassBlock, index: int) -> Tensor:
        """A block's logits [G, C] in backward, made again where they were not kept."""
        place = self.place(index)
        if index >= self._num or place is None:
            return step.logits(block, step.class_rows(block), place)
        shape = len(step.features_Gd), len(block.class_ids)
        return place[: math.prod(shape)].view(shape)


class Parts:
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
