"""The forward and backward pass over a rank's classes with the kernels in `heads/tiles/kernels.py`.

No tensor of logits exists in the forward pass. The backward pass computes the logits of each block
again and writes their gradient in the dtype of the products, from which two products compute the
gradients of features and rows.

The kernels omit the logit of each row's label. It is a product of two vectors, which is computed in
float32 and may have a margin. Its statistics are those of one more block, of one column. Its
gradient is not rounded to half precision: it is the largest one of a row, and its rounding error
would exceed the gradients of most other classes.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from heads.blockwise import BlockwiseLogits, ComputedBlock, GradientSums
from heads.logits import inverse_norms, tangential
from heads.losses import Block, LabelPositions, Reduction, Stats, Tile, logsumexp
from heads.tiles.launch import BlockInputs, num_splits
from heads.weights import ClassBlock

# Shape legend: G rows of the class group, C classes of a block, d features, N reductions, S splits
# of all blocks.


class TileWalk:
    """The statistics of a rank's classes and, given their gradients, all other gradients."""

    def __init__(self, logits: BlockwiseLogits, tile: Tile, *, with_graph: bool) -> None:
        self._logits, self._tile, self._with_graph = logits, tile, with_graph
        self._blocks = logits.blocks()

    def statistics(self) -> list[Stats]:
        """Return the statistics of all false logits and those of the true logits; an empty list for
        a rank without classes."""
        if not self._blocks:
            return []
        features = self._logits.features_Gd
        splits = [num_splits(features, len(block.class_ids)) for block in self._blocks]
        *starts, num = accumulate(splits, initial=0)
        shape = num, len(features)
        totals = features.new_empty(len(self._tile.reductions), *shape, dtype=torch.float32)
        winners = None
        if Reduction.MAX in self._tile.reductions:
            winners = features.new_empty(shape, dtype=torch.int64)
        for block, start, stop in zip(self._blocks, starts, [*starts[1:], num], strict=True):
            inputs, _ = self._inputs(block)
            inputs.write_statistics(self._tile, slice(start, stop), totals, winners)
        self._totals, self._winners = _merged(self._tile.reductions, totals, winners)
        self._true = _TrueLogits.of(self._logits, with_graph=self._with_graph)
        false = self._logits.loss.of_terms(tuple(self._totals), self._winners)
        return [false, self._true.computed.stats]

    def add_gradients(self, grads: list[Stats], to: GradientSums) -> None:
        """Add the gradients to `to`, given those of `statistics`."""
        if not self._blocks:
            return
        by_false, by_true = grads
        num, num_rows = self._totals.shape
        by_totals = torch.stack([grad.reshape(num_rows) for grad in by_false[:num]])
        for block in self._blocks:
            inputs, rows_Cd = self._inputs(block)
            grad_GC = inputs.gradient(self._tile, self._totals, self._winners, by_totals)
            self._add_products(block, inputs, rows_Cd, grad_GC, to)
        self._true.add_gradients(by_true, to)

    def _inputs(self, block: ClassBlock) -> tuple[BlockInputs, Tensor]:
        """Return the inputs of the kernels for a block, and its class rows [C, d].

        Cosine logits are products with the class rows themselves, times a factor per class, so that
        no normalized copy of the rows is needed.
        """
        logits = self._logits
        rows_Cd = logits.weights.rows(block, logits.rows)
        inputs = BlockInputs(
            features=logits.features_Gd,
            rows=rows_Cd.to(logits.compute_dtype),
            factors=inverse_norms(rows_Cd).squeeze(1) if logits.logit_map.normalizes else None,
            shifts=logits.shift(block),
            vectors=logits.loss.tile_vectors(block.class_ids),
            class_ids=block.class_ids,
            labels=logits.weights.columns(block, logits.labels_G),
        )
        return inputs, rows_Cd

    def _add_products(
        self,
        block: ClassBlock,
        inputs: BlockInputs,
        rows_Cd: Tensor,
        grad_GC: Tensor,
        to: GradientSums,
    ) -> None:
        logits = self._logits
        if to.bias is not None or to.scalars is not None:
            grad_C = grad_GC.sum(0, dtype=torch.float32)
            if inputs.factors is not None:
                grad_C /= inputs.factors
            logits.add_shift_gradient(block, grad_C, to)
        if to.features is not None:
            logits.product(grad_GC, inputs.rows, add=to.features, out=to.features)
        if to.rows is None:
            return
        if inputs.factors is None:
            logits.write_gradient_of_rows(block, grad_GC, to.rows)
        else:
            grad_Cd = logits.product(grad_GC.T, logits.features_Gd)
            logits.weights.put_gradient(block, tangential(rows_Cd, grad_Cd), to.rows)


def _merged(
    reductions: tuple[Reduction, ...], totals_NSG: Tensor, winners_SG: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Merge the statistics [N, S, G] of the splits; return the totals [N, G] and the class IDs [G]
    of the maxima."""
    totals = []
    for reduction, parts_SG in zip(reductions, totals_NSG, strict=True):
        match reduction:
            case Reduction.SUM:
                totals.append(parts_SG.sum(0))
            case Reduction.LOGSUMEXP:
                totals.append(logsumexp(parts_SG.T))
            case Reduction.MAX:
                assert winners_SG is not None
                largest = parts_SG.amax(0)
                tied = winners_SG.where(parts_SG == largest, torch.iinfo(torch.int64).max)
                totals.append(largest)
                return torch.stack(totals), tied.amin(0)
    return torch.stack(totals), None


@dataclass(frozen=True)
class _TrueLogits:
    """The logits of the labels of G rows, and their statistics.

    `here` [G] is true for rows whose class this rank holds. `rows_Gd` are the rows of these classes
    before the logit map, and `vectors_Gd` the vectors that are multiplied by the features.
    """

    logits: BlockwiseLogits
    here: Tensor
    rows_Gd: Tensor
    vectors_Gd: Tensor
    computed: ComputedBlock

    @classmethod
    def of(cls, logits: BlockwiseLogits, *, with_graph: bool) -> "_TrueLogits":
        labels = logits.labels_G
        here = logits.weights.held.has(labels)
        rows = logits.weights.rows_of_labels(labels, logits.rows)
        true, vectors = logits.true_logits(rows)
        column = true.unsqueeze(1).requires_grad_(with_graph)
        positions = LabelPositions(here, torch.zeros_like(labels))
        view = Block.at(labels.unsqueeze(1), labels, positions, column)
        with torch.set_grad_enabled(with_graph):
            own = logits.loss.statistics(column, view)
            none = logits.identity()
            stats = tuple(
                stat.where(here.view(-1, *(1,) * (stat.ndim - 1)), other)
                for stat, other in zip(own, none, strict=True)
            )
        return cls(logits, here, rows, vectors, ComputedBlock(column, view, stats))

    def add_gradients(self, grads: Stats, to: GradientSums) -> None:
        logits, labels = self.logits, self.logits.labels_G
        grad_G1 = self.computed.gradient_of_logits(grads)
        by_shift = grad_G1.squeeze(1).clone()
        if logits.margins is not None:
            by_scale = logits.margins.through(grad_G1, self.computed.view.positions)
            if to.scalars is not None:
                to.scalars[0] += by_scale
        logits.add_true_gradients(...)
