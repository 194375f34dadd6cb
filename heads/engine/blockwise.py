"""One rank's features and class rows, and what both ways to walk over its classes share.

A walk computes the logits [G, C] of a rank's classes block by block and reduces them to a few
statistics per row. Backward, it converts the gradient of the statistics to the gradient of the
logits, and then, with two matrix products, to the gradients of features and rows. `torch_walk.py`
uses torch operations, and `tiles/walk.py` Triton kernels.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.engine.block_size import Processor, bytes_of_class
from heads.logit_maps import LogitMap, Margins
from heads.losses import Choice, Loss, Stats
from heads.rows.node_values import NodeValues
from heads.rows.row_update import UpdatedRows
from heads.weights import ClassBlock, ClassWeights

# Shape legend: G rows of the class group, P labels of these rows (P = G without label sets),
# C classes of a block, d features, n nodes of this rank.


@dataclass
class BlockwiseLogits:
    """The logits of G rows for this rank's classes, computed one block at a time.

    `features_Gd` are the features after the logit map, multiplied by its scale. `rows` and `bias`
    contain one entry per node; `bias` is None if the head has no bias. `offset` and `log_prior` [K]
    are added to the logits. `margins` is None for a map without a margin. `memory_bytes` limits the
    memory used for logits. `processor` selects the code and the block sizes for a CPU or a GPU.
    `updates_rows`: whether backward updates the rows of each block, and allocates their gradient.
    `labels_P` are the class IDs of the labels. With label sets, `row_of_label` [P] are the rows of
    the labels and `label_offsets` [G + 1] those of the sets. `choice` contains the classes that the
    loss selected (None: all). `most_rows` is the largest G of all class groups, so that ranks with
    the same classes compute them in the same blocks.
    """

    weights: ClassWeights
    loss: Loss
    logit_map: LogitMap
    memory_bytes: int
    processor: Processor
    updates_rows: bool
    features_Gd: Tensor
    labels_P: Tensor
    row_of_label: Tensor | None
    label_offsets: Tensor | None
    most_rows: int
    rows: NodeValues
    bias: NodeValues | None
    offset: Tensor | None
    log_prior: Tensor | None
    margins: Margins | None
    choice: Choice | None
    compute_dtype: torch.dtype
    stats_dtype: torch.dtype

    def true_vectors(self) -> tuple[Tensor, Tensor]:
        """Return the class rows [P, d] of the labels, and the vectors that are multiplied by the
        features.

        Labels whose class another rank holds get arbitrary values. This rank must hold a class.
        """
        rows = self.weights.rows_of_labels(self.labels_P, self.rows).to(self.stats_dtype)
        # Compute these few products in the precision of the statistics: the derivative of arccos is
        # large near +-1, so a margin amplifies the rounding errors of bf16 products.
        return rows, self.logit_map.normalized(rows).to(self.compute_dtype).to(self.stats_dtype)

    def features_of_labels(self) -> Tensor:
        """Return the features [P, d] of the row of each label."""
        if self.row_of_label is None:
            return self.features_Gd
        return self.features_Gd.index_select(0, self.row_of_label)

    def true_logits(self, vectors_Pd: Tensor) -> Tensor:
        """Return the true logits [P] with their margin, given `true_vectors`."""
        shifts: Tensor | float = 0.0
        if self.log_prior is not None:
            shifts = self.log_prior[self.labels_P].to(self.stats_dtype)
        if self.offset is not None:
            shifts = shifts + self.offset
        if self.bias is not None:
            bias = self.weights.rows_of_labels(self.labels_P, self.bias).squeeze(1)
            shifts = shifts + bias.to(self.stats_dtype)
        products = (self.features_of_labels().to(self.stats_dtype) * vectors_Pd).sum(1)
        if self.margins is None:
            return products + shifts
        self.margins.set(products, shifts)
        return self.margins.logits

    def blocks(self) -> list[ClassBlock]:
        return list(self.weights.blocks(self.classes_at_once(), self.choice))

    def classes_at_once(self) -> int:
        """Return the number of classes per block; see `Processor.classes_at_once`.

        The logits of a block use a fixed part of the memory budget, and so does a copy of its
        class rows or their gradient. The rest of the budget covers a few temporaries of that size
        and the logits saved for backward, which use a quarter of the budget.
        """
        column_bytes = bytes_of_class(
            rows=max(self.most_rows, 1),
            dim=self.features_Gd.shape[1],
            held=self.rows.held.dtype,
            compute=self.compute_dtype,
            stats=self.stats_dtype,
            copies=self.logit_map.normalizes or not self.weights.is_plain or self.updates_rows,
            is_cuda=self.processor.kind == "cuda",
        )
        return self.processor.classes_at_once(column_bytes, self.memory_bytes)

    def class_rows(self, block: ClassBlock) -> Tensor:
        """Return the class rows [C, d], ready for the product with the features."""
        rows = self.logit_map.normalized(self.weights.rows(block, self.rows))
        return rows.to(self.compute_dtype)

    def shift(self, block: ClassBlock) -> Tensor | None:
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

    def identity(self) -> Stats:
        """Return the statistics of a rank without classes."""
        like = self.features_Gd.new_empty(len(self.features_Gd), dtype=self.stats_dtype)
        stats = self.loss.identity(like)
        if self.row_of_label is None:
            return stats
        return *stats[:-1], like.new_zeros(len(self.labels_P))

    def add_shift_gradient(self, block: ClassBlock, grad_C: Tensor, to: "GradientSums") -> None:
        """Write the gradient of a block's biases, and add its term to that of the offset."""
        if to.bias is not None:
            self.weights.put_gradient(block, grad_C.unsqueeze(1), to.bias)
        if to.scalars is not None:
            to.scalars[1] += grad_C.sum()

    def add_feature_gradient(self, grad_GC: Tensor, rows_Cd: Tensor, to: "GradientSums") -> None:
        """Add a block's term to the gradient of the features."""
        if to.needs_features:
            to.features = self.product(grad_GC, rows_Cd, add=to.features, out=to.features)

    def put_gradient_of_rows(self, block: ClassBlock, grad_GC: Tensor, to: "RowGradients") -> None:
        """Compute the gradient of a block's class rows from that of its logits."""
        # If possible, write to the gradient directly, without a second K x d tensor.
        target = None if self.logit_map.normalizes else to.target(block)
        grad_Cd = self.product(grad_GC.T, self.features_Gd, out=target)
        if target is not None:
            return
        if self.logit_map.normalizes:
            rows_Cd = self.weights.rows(block, self.rows).to(self.stats_dtype)
            grad_Cd = self.logit_map.gradient(rows_Cd, grad_Cd)
        to.put(block, grad_Cd)

    def product(
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


class HeldGradient:
    """Receives the gradients of class rows, one block at a time, and writes them to `grad` [n, d],
    to the nodes of their classes."""

    def __init__(self, weights: ClassWeights, grad: Tensor) -> None:
        self._weights, self.grad = weights, grad
        self._labels: tuple[Tensor, Tensor] | None = None

    def target(self, block: ClassBlock) -> Tensor | None:
        """Return the part of `grad` for a block's class rows, to which they may be written instead
        of a call to `put`; None if it is not contiguous."""
        return self._weights.contiguous_part(block, self.grad)

    def expect_labels(self, labels_P: Tensor, grads_Pd: Tensor) -> None:
        """Add `grads_Pd` to the gradients of the class rows of `labels_P` in `finish`."""
        self._labels = labels_P, grads_Pd

    def put(self, block: ClassBlock, grad_Cd: Tensor) -> None:
        """Write the gradient [C, d] of a block's class rows."""
        self._weights.put_gradient(block, grad_Cd, self.grad)

    def finish(self) -> None:
        """Complete the gradients after the last block."""
        if self._labels is not None:
            self._weights.add_gradient_of_labels(*self._labels, self.grad)


RowGradients = HeldGradient | UpdatedRows


@dataclass
class GradientSums:
    """Buffers for the gradients of this rank's blocks (None: not required).

    `rows` receives the gradients of class rows. `bias` [n, 1] is the gradient of the path sums of
    biases, and `scalars` [2] are the gradients of the logarithm of the scale and of the offset.
    `features` [G, d] is the gradient of the features after the logit map, if `needs_features`; the
    first block allocates it.
    """

    needs_features: bool = False
    features: Tensor | None = None
    rows: RowGradients | None = None
    bias: Tensor | None = None
    scalars: Tensor | None = None
