"""The walk over a rank's classes with the kernels in `heads/tiles/kernels.py`.

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

from heads.engine.blockwise import BlockwiseLogits, GradientSums
from heads.logits import inverse_norms, tangential
from heads.losses import Stats, logsumexp
from heads.losses.tile import Reduction, Tile
from heads.tiles.launch import BlockInputs, num_splits
from heads.weights import ClassBlock

# Shape legend: G rows of the class group, C classes of a block, d features, N reductions, S splits
# of all blocks or parts of a sum.


class TileWalk:
    """The statistics of a rank's classes and, given their gradients, all other gradients."""

    def __init__(self, logits: BlockwiseLogits, tile: Tile, *, with_graph: bool) -> None:
        self._logits, self._tile, self._with_graph = logits, tile, with_graph
        self.blocks = logits.blocks()
        held = logits.weights.held
        self._labels_G = held.position.index_select(0, logits.labels_G) - held.first

    def statistics(self) -> list[Stats]:
        """Return the statistics of all false logits and those of the true logits; an empty list for
        a rank without classes."""
        if not self.blocks:
            return []
        features = self._logits.features_Gd
        splits = [num_splits(self._tile, features, len(block.class_ids)) for block in self.blocks]
        *starts, num = accumulate(splits, initial=0)
        shape = num, len(features)
        totals = features.new_empty(len(self._tile.reductions), *shape, dtype=torch.float32)
        winners = None
        if Reduction.MAX in self._tile.reductions:
            winners = features.new_empty(shape, dtype=torch.int64)
        for block, start, stop in zip(self.blocks, starts, [*starts[1:], num], strict=True):
            inputs = self._inputs(block)[0]
            inputs.write_statistics(self._tile, slice(start, stop), totals, winners)
            del inputs  # free its copies of class rows before the next block
        self._totals, self._winners = _merged(self._tile.reductions, totals, winners)
        self._leaves = [total.requires_grad_(self._with_graph) for total in self._totals.unbind()]
        self._true = _TrueLogits(self._logits, with_graph=self._with_graph)
        with torch.set_grad_enabled(self._with_graph):
            false = self._logits.loss.of_terms(self._leaves, self._winners)
        return [false, self._true.statistics]

    def add_gradients(self, loss: Tensor, grad_loss: Tensor, to: GradientSums) -> None:
        """Add the gradients of `loss`, a function of `statistics`, to `to`."""
        if not self.blocks:
            return
        by_totals = torch.autograd.grad(
            loss,
            self._leaves,
            grad_loss,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        grads = torch.stack(by_totals)
        of_labels = self._true.gradients(loss, grad_loss)
        if to.rows is not None:
            to.rows.expect_labels(self._logits.labels_G, of_labels.of_rows())
        of_shifts = to.bias is not None or to.scalars is not None
        for block in self.blocks:
            inputs, rows_Cd = self._inputs(block)
            grad_GC, parts_SC = inputs.gradient(
                self._tile, self._totals, self._winners, grads, of_shifts=of_shifts
            )
            if parts_SC is not None:
                target = None
                if to.bias is not None and to.scalars is None:
                    target = self._logits.weights.contiguous_part(block, to.bias)
                if target is None:
                    self._logits.add_shift_gradient(block, parts_SC.sum(0), to)
                else:  # without a second tensor and its copy
                    torch.sum(parts_SC, 0, out=target.squeeze(1))
            self._add_products(block, inputs, rows_Cd, grad_GC, to)
            del inputs, rows_Cd, grad_GC
        of_labels.add(to)

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
            vectors=logits.loss.tile_vectors(block.class_ids),
            class_ids=block.class_ids,
            labels=self._labels_G,
            first_class=block.positions.start,
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
        logits.add_feature_gradient(grad_GC, inputs.rows, to)
        if to.rows is None:
            return
        if inputs.factors is None:
            logits.put_gradient_of_rows(block, grad_GC, to.rows)
        else:
            grad_Cd = logits.product(grad_GC.T, logits.features_Gd)
            to.rows.put(block, tangential(rows_Cd, grad_Cd))


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


class _TrueLogits:
    """The logits of the labels of G rows, and their statistics."""

    def __init__(self, logits: BlockwiseLogits, *, with_graph: bool) -> None:
        self._logits = logits
        # The rows and logits of classes that other ranks hold are arbitrary.
        here, _ = logits.weights.held.nearest(logits.labels_G)
        self._rows_Gd, self._vectors_Gd = logits.true_vectors()
        self._leaf_G = logits.true_logits(self._vectors_Gd).requires_grad_(with_graph)
        with torch.set_grad_enabled(with_graph):
            of_labels = logits.loss.of_labels(self._leaf_G, logits.labels_G)
            self.statistics = tuple(
                stat.where(here.view(-1, *(1,) * (stat.ndim - 1)), none)
                for stat, none in zip(of_labels, logits.identity(), strict=True)
            )

    def gradients(self, loss: Tensor, grad_loss: Tensor) -> "_TrueGradients":
        """Return the gradients of `loss`, a function of `statistics`."""
        logits = self._logits
        (grad_G,) = torch.autograd.grad(loss, self._leaf_G, grad_loss, retain_graph=True)
        products_G, by_scale = grad_G, None
        if logits.margins is not None:
            products_G, by_scale = logits.margins.through(grad_G)
        return _TrueGradients(logits, self._rows_Gd, self._vectors_Gd, grad_G, products_G, by_scale)


@dataclass(frozen=True)
class _TrueGradients:
    """The terms of the true logits in the gradients.

    `true_rows_Gd` and `vectors_Gd` are `BlockwiseLogits.true_vectors`. `grad_G` is the gradient of
    the true logits, and `products_G` that of the products of features and vectors, without margins.
    `by_scale` is the term that the margins add to the gradient of the logarithm of the scale.
    """

    logits: BlockwiseLogits
    true_rows_Gd: Tensor
    vectors_Gd: Tensor
    grad_G: Tensor
    products_G: Tensor
    by_scale: Tensor | None

    def of_rows(self) -> Tensor:
        """Return the gradients [G, d] of the class rows of the labels."""
        logits = self.logits
        grad_Gd = self.products_G.unsqueeze(1) * logits.features_Gd
        if logits.logit_map.normalizes:
            grad_Gd = logits.logit_map.gradient(self.true_rows_Gd, grad_Gd)
        return grad_Gd

    def add(self, to: GradientSums) -> None:
        """Add the terms to all other gradients, to which all blocks have been added."""
        logits = self.logits
        if to.bias is not None:
            grads_G1 = self.grad_G.unsqueeze(1)
            logits.weights.add_gradient_of_labels(logits.labels_G, grads_G1, to.bias)
        if to.scalars is not None:
            to.scalars[1] += self.grad_G.sum()
            if self.by_scale is not None:
                to.scalars[0] += self.by_scale
        if to.features is not None:
            to.features.addcmul_(self.products_G.unsqueeze(1), self.vectors_Gd)
