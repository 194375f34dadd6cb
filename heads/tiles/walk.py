"""The walk over a rank's classes with the kernels in `heads/tiles/kernels.py`.

No tensor of logits exists in the forward pass. The backward pass computes the logits of each block
again and writes their gradient in the dtype of the products, from which two products compute the
gradients of features and rows.

The kernels omit the logits of the labels of each row. Each is a product of two vectors, which is
computed in float32 and may have a margin. Their statistics are those of one more block. Their
gradients are not rounded to half precision: they are the largest ones of a row, and their rounding
errors would exceed the gradients of most other classes.
"""

from itertools import accumulate

import torch
from torch import Tensor

from heads.engine.blockwise import BlockwiseLogits, GradientSums
from heads.logit_maps import inverse_norms, tangential
from heads.losses import Block, LabelPositions, Stats, logsumexp
from heads.losses.tile import Reduction, Tile
from heads.tiles.launch import BlockInputs, num_splits
from heads.weights import ClassBlock

# Shape legend: G rows of the class group, P labels of these rows (P = G without label sets),
# C classes of a block, d features, N reductions, S splits of all blocks or parts of a sum.


class TileWalk:
    """The statistics of a rank's classes and, given their gradients, all other gradients."""

    def __init__(self, logits: BlockwiseLogits, tile: Tile, *, with_graph: bool) -> None:
        self._logits, self._tile, self._with_graph = logits, tile, with_graph
        self.blocks = logits.blocks()
        self._labels_P = logits.weights.held.positions(logits.labels_P)

    def statistics(self) -> list[Stats]:
        """Return the statistics of all false logits and those of the true logits; an empty list for
        a rank without classes."""
        if not self.blocks:
            return []
        features, reductions = self._logits.features_Gd, self._tile.reductions
        splits = [num_splits(self._tile, features, len(block.class_ids)) for block in self.blocks]
        *starts, num = accumulate(splits, initial=0)
        parts_NSG = features.new_empty(len(reductions), num, len(features), dtype=torch.float32)
        for block, start, stop in zip(self.blocks, starts, [*starts[1:], num], strict=True):
            inputs = self._inputs(block)[0]
            inputs.write_statistics(self._tile, slice(start, stop), parts_NSG)
            del inputs  # free its copies of class rows before the next block
        self._totals_NG = torch.stack(
            [
                logsumexp(parts_SG.T) if each is Reduction.LOGSUMEXP else parts_SG.sum(0)
                for each, parts_SG in zip(reductions, parts_NSG, strict=True)
            ]
        )
        self._leaves = [each.requires_grad_(self._with_graph) for each in self._totals_NG.unbind()]
        # The true logits are not among these logits, so their sum is 0.
        true = self._true_statistics()
        return [(*self._leaves, torch.zeros_like(true[-1])), true]

    def _true_statistics(self) -> Stats:
        logits, labels_P = self._logits, self._logits.labels_P
        # The rows and logits of classes that other ranks hold are arbitrary.
        here, _ = logits.weights.held.nearest(labels_P)
        self._true_rows_Pd, self._true_vectors_Pd = logits.true_vectors()
        self._true_P = logits.true_logits(self._true_vectors_Pd).requires_grad_(self._with_graph)
        positions = LabelPositions(torch.ones_like(here), torch.zeros_like(labels_P))
        block = Block(labels_P.unsqueeze(1), labels_P, positions, self._true_P)
        with torch.set_grad_enabled(self._with_graph):
            stats = tuple(
                stat.where(here.view(-1, *(1,) * (stat.ndim - 1)), none)
                for stat, none in zip(
                    logits.loss.statistics(self._true_P.unsqueeze(1), block),
                    logits.loss.identity(self._true_P.detach()),
                    strict=True,
                )
            )
            if logits.row_of_label is None:
                return stats
            merged = [
                _of_rows(stat, logits.row_of_label, len(logits.features_Gd), reduction)
                for stat, reduction in zip(stats[:-1], logits.loss.reductions, strict=False)
            ]
            return *merged, stats[-1]

    def add_gradients(self, loss: Tensor, grad_loss: Tensor, to: GradientSums) -> None:
        """Add the gradients of `loss`, a function of `statistics`, to `to`."""
        if not self.blocks:
            return
        logits = self._logits
        *by_totals, by_true_P = torch.autograd.grad(
            loss,
            (*self._leaves, self._true_P),
            grad_loss,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        grads_NG, products_P, by_scale = torch.stack(by_totals), by_true_P, None
        if logits.margins is not None:
            products_P, by_scale = logits.margins.through(by_true_P)
        if to.rows is not None:
            grads_Pd = products_P.unsqueeze(1) * logits.features_of_labels()
            if logits.logit_map.normalizes:
                grads_Pd = logits.logit_map.gradient(self._true_rows_Pd, grads_Pd)
            to.rows.expect_labels(logits.labels_P, grads_Pd)
        for block in self.blocks:
            self._add_block(block, grads_NG, to)
        if to.bias is not None:
            by_true_P1 = by_true_P.unsqueeze(1)
            logits.weights.add_gradient_of_labels(logits.labels_P, by_true_P1, to.bias)
        if to.scalars is not None:
            to.scalars[1] += by_true_P.sum()
            if by_scale is not None:
                to.scalars[0] += by_scale
        if to.features is not None:
            terms_Pd = products_P.unsqueeze(1), self._true_vectors_Pd
            if logits.row_of_label is None:
                to.features.addcmul_(*terms_Pd)
            else:
                to.features.index_add_(0, logits.row_of_label, terms_Pd[0] * terms_Pd[1])

    def _inputs(self, block: ClassBlock) -> tuple[BlockInputs, Tensor]:
        """Return the inputs of the kernels for a block, and its class rows [C, d].

        Cosine logits are products with the class rows themselves, times a factor per class, so that
        the products need no normalized copy of the rows. Products of fp16 rows could overflow, so
        these are normalized.
        """
        logits = self._logits
        factors = None
        rows_Cd = multiplied_Cd = logits.weights.rows(block, logits.rows)
        if logits.logit_map.normalizes and logits.compute_dtype == torch.float16:
            multiplied_Cd = logits.logit_map.normalized(rows_Cd)
        elif logits.logit_map.normalizes:
            factors = inverse_norms(rows_Cd).squeeze(1).float()
        assert isinstance(block.positions, slice)  # sampled classes do not use tiles
        inputs = BlockInputs(
            features=logits.features_Gd,
            rows=multiplied_Cd.to(logits.compute_dtype),
            factors=factors,
            shifts=logits.shift(block),
            labels=self._labels_P,
            label_offsets=logits.label_offsets,
            first_class=block.positions.start,
        )
        return inputs, rows_Cd

    def _add_block(self, block: ClassBlock, grads_NG: Tensor, to: GradientSums) -> None:
        """Add the terms of a block's false logits, given the gradients of their statistics."""
        logits = self._logits
        inputs, rows_Cd = self._inputs(block)
        of_shifts = to.bias is not None or to.scalars is not None
        grad_GC, parts_SC = inputs.gradient(
            self._tile, self._totals_NG, grads_NG, of_shifts=of_shifts
        )
        if parts_SC is not None:
            target = None
            if to.bias is not None and to.scalars is None:
                target = logits.weights.contiguous_part(block, to.bias)
            if target is None:
                logits.add_shift_gradient(block, parts_SC.sum(0), to)
            else:  # without a second tensor and its copy
                torch.sum(parts_SC, 0, out=target.squeeze(1))
        logits.add_feature_gradient(grad_GC, inputs.rows, to)
        if to.rows is not None and inputs.factors is None:
            logits.put_gradient_of_rows(block, grad_GC, to.rows)
        elif to.rows is not None:
            grad_Cd = logits.product(grad_GC.T, logits.features_Gd)
            to.rows.put(block, tangential(rows_Cd, grad_Cd))


def _of_rows(stat_P: Tensor, row_of_label: Tensor, num_rows: int, reduction: Reduction) -> Tensor:
    """Merge a statistic of labels to that of their rows [num_rows]."""
    zeros = stat_P.new_zeros(num_rows)
    if reduction is Reduction.SUM:
        return zeros.index_add(0, row_of_label, stat_P)
    top = torch.full_like(zeros, -torch.inf)
    top = top.scatter_reduce(0, row_of_label, stat_P.detach(), "amax")
    exists = top != -torch.inf
    powers = (stat_P - top.where(exists, 0).index_select(0, row_of_label)).exp()
    sums = zeros.index_add(0, row_of_label, powers)
    # `log` of 1 instead of 0, whose derivative is infinite
    return (top + sums.where(exists, 1).log()).where(exists, -torch.inf)
