"""Updates class rows by SGD block by block, so that no gradient of all rows exists.

`FusedSGD` (`heads/fused_sgd.py`) is the optimizer that uses this module. A leaf of the label tree
is updated as soon as the gradient of its class row is known. The gradient of an inner node is a sum
over its subtree, so inner nodes are updated at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_reduce_sum
from heads.gradients import squared_norm
from heads.rows.hashing import random_bits, rows_at_once
from heads.rows.inner_gradients import InnerGradients, InnerNodes
from heads.rows.node_values import NodeValues, wide_dtype
from heads.rows.rounding import NUM_RANDOM_BITS
from heads.rows.update_kernel import has_kernel, update
from heads.weights import ClassBlock, ClassWeights

# Keeps the random bits of a step independent of those of the initial rows, whose key is the seed.
_ROUNDING = 0x726F756E64
# Number of inner nodes that are updated at a time.
_NODES_AT_ONCE = 8192

# Shape legend: C classes of a block, P labels, d features, n nodes of this rank.


@dataclass(frozen=True)
class RowStep:
    """One update: w - lr (g / divisor + weight_decay w), rounded at random with `key`, the number
    of the step and its seed.

    Nothing changes if `skipped`, a scalar on the device, is true. If `writes` is false, only the
    norm of the gradient is computed.
    """

    lr: float
    weight_decay: float
    key: int
    skipped: Tensor
    divisor: Tensor | None = None
    writes: bool = True


class UpdatedRows:
    """Receives the gradients of class rows, one block at a time, and updates the nodes.

    `finish` must be called after the last block. `squared_norm` is then the squared norm of the
    gradient of this rank's nodes.
    """

    def __init__(
        self,
        weights: ClassWeights,
        inner_nodes: InnerNodes | None,
        values: NodeValues,
        step: RowStep,
        *,
        on_gpu: bool,
        class_group: ProcessGroup | None,
        data_group: ProcessGroup | None,
    ) -> None:
        self._uses_kernel = on_gpu and has_kernel(values.held.dtype)
        self._weights, self._values, self._step = weights, values, step
        self._class_group, self._data_group = class_group, data_group
        self._labels: tuple[Tensor, Tensor] | None = None
        self._inner: InnerGradients | None = None
        if inner_nodes is not None:
            held = values.held
            self._inner = InnerGradients(inner_nodes, held.shape[1], wide_dtype(held.dtype))
        device = values.held.device
        self.squared_norm = torch.zeros((), dtype=torch.float64, device=device)

    def target(self, block: ClassBlock) -> None:
        """Return None: every gradient is passed to `put`."""

    def expect_labels(self, labels_P: Tensor, grads_Pd: Tensor) -> None:
        """Add `grads_Pd` to the gradients of the class rows of `labels_P` in the blocks to come."""
        self._labels = labels_P, grads_Pd

    def put(self, block: ClassBlock, grad_Cd: Tensor) -> None:
        """Update the nodes of a block's classes, given the gradient of their rows, which this
        method may overwrite (collective over the data group)."""
        # The gradient may have the type of the features.
        grad_Cd = grad_Cd.to(wide_dtype(self._values.held.dtype))
        if self._labels is not None:
            labels_P, grads_Pd = self._labels
            columns = self._weights.columns(block, labels_P)
            nearest = columns.clamp(0, len(grad_Cd) - 1)
            here = (nearest == columns).unsqueeze(1)
            grad_Cd.index_add_(0, nearest, grads_Pd.where(here, 0).to(grad_Cd.dtype))
        all_reduce_sum(grad_Cd, self._data_group)
        if self._inner is None:
            self._update(block.positions, grad_Cd)
            return
        nodes, is_leaf = self._inner.add(block.positions, grad_Cd)
        self._update(nodes, grad_Cd, is_leaf)

    def finish(self) -> None:
        """Update the inner nodes (collective over the class group)."""
        if self._inner is None:
            return
        nodes, grads = self._inner.total(self._class_group)
        for start in range(0, len(nodes), _NODES_AT_ONCE):
            part = slice(start, start + _NODES_AT_ONCE)
            self._update(nodes[part], grads[part])

    def _update(self, nodes: slice | Tensor, grad: Tensor, is_leaf: Tensor | None = None) -> None:
        """Update nodes, given their gradients [C, d]. Nodes that are not leaves keep their values
        if `is_leaf` [C, 1] is given."""
        step, values = self._step, self._values
        if is_leaf is not None:
            grad = grad.where(is_leaf, 0)
        keeps = step.skipped if is_leaf is None else step.skipped | ~is_leaf
        if step.writes and self._uses_kernel:
            squares = update(
                values,
                nodes,
                grad,
                first_node=self._weights.start,
                keeps=keeps,
                divisor=step.divisor,
                lr=step.lr,
                weight_decay=step.weight_decay,
                key=step.key,
            )
            self.squared_norm += squares.double().sum()
            return
        self.squared_norm += squared_norm([grad], grad.device)
        if not step.writes:
            return
        at_once = rows_at_once(grad.shape[1], grad.device)
        for start in range(0, len(grad), at_once):
            part = slice(start, min(start + at_once, len(grad)))
            kept = keeps[part] if keeps.ndim else keeps
            if isinstance(nodes, slice):
                some: slice | Tensor = slice(nodes.start + part.start, nodes.start + part.stop)
            else:
                some = nodes[part]
            self._descend(some, grad[part], kept)

    def _descend(self, nodes: slice | Tensor, grad: Tensor, keeps: Tensor) -> None:
        """Update nodes with torch operations, except where `keeps`, a scalar or [C, 1], is true."""
        step, values = self._step, self._values
        old = values.read(nodes).to(wide_dtype(values.held.dtype))
        new = descended(
            old,
            grad,
            lr=step.lr,
            weight_decay=step.weight_decay,
            divisor=step.divisor,
            skipped=keeps,
        )
        bits = None
        if values.held.dtype != new.dtype:
            if isinstance(nodes, slice):
                nodes = torch.arange(nodes.start, nodes.stop, device=new.device)
            ids = self._weights.start + nodes
            num_bits = NUM_RANDOM_BITS[values.held.dtype]
            bits = random_bits(ids, new.shape[1], num_bits, seed=step.key)
        values.write(nodes, new, bits)


def descended(
    old: Tensor,
    grad: Tensor,
    *,
    lr: float,
    weight_decay: float,
    divisor: Tensor | None,
    skipped: Tensor | None,
) -> Tensor:
    """Return old - lr (grad / divisor + weight_decay old), or `old` where `skipped` is true."""
    change = grad if divisor is None else grad / divisor
    if weight_decay:
        change = change.add(old, alpha=weight_decay)
    if skipped is not None:
        change = change.where(~skipped, 0)
    return old.sub(change, alpha=lr)


class RowUpdate:
    """The state of `FusedSGD` between a head's backward pass and the optimizer's step.

    `group` is the parameter group of the class rows. If `deferred`, the backward pass only keeps
    what it needs to compute the gradient again, and `apply` updates the rows. It then computes the
    norm of the gradient only if `needs_norm`. Otherwise, the backward pass updates the rows.

    `squared_norm` is the squared norm of the gradient of this rank's nodes (None: not computed).
    """

    squared_norm: Tensor | None = None

    def __init__(self, group: dict[str, Any], *, deferred: bool, needs_norm: bool) -> None:
        self.group, self.deferred, self.needs_norm = group, deferred, needs_norm
        self._is_required = False
        self._again: Callable[[RowStep], object] | None = None
        self._first: RowStep | None = None
        self._factor: Tensor | float = 1.0
        self._inner_nodes: InnerNodes | None = None

    def rows(
        self, weights: ClassWeights, values: NodeValues, step: RowStep, **options: Any
    ) -> UpdatedRows:
        """Return an `UpdatedRows` with its other `options`."""
        if weights.is_plain:
            self._inner_nodes = None
        elif self._inner_nodes is None or self._inner_nodes.weights is not weights:
            self._inner_nodes = InnerNodes(weights)
        return UpdatedRows(weights, self._inner_nodes, values, step, **options)

    def check_choice(self, kind: str) -> None:
        """Raise ValueError if a step of the loss `kind`, which computes only some of the classes,
        would not decay the rows of the others."""
        if self.group["weight_decay"]:
            raise ValueError(
                f"weight_decay is {self.group['weight_decay']:g}, but FusedSGD updates only the "
                f"classes that a step of {kind} computes: set weight_decay=0"
            )

    def require(self) -> None:
        """Note that the backward pass that is running requires the gradient of the rows."""
        self._is_required = True

    def is_required(self) -> bool:
        """Return whether `require` was called since the last call of this method."""
        found, self._is_required = self._is_required, False
        return found

    def visit(
        self,
        walk: Callable[[RowStep | None], Tensor | None],
        *,
        again: Callable[[RowStep], object],
        key: int,
        skipped: Tensor,
    ) -> None:
        """Run `walk` for a backward pass that requires the gradient of the rows (collective).

        It computes all gradients, updates the rows with a step if it is given one, and returns the
        squared norm of their gradient. `again` does so with the gradient of the rows alone; `apply`
        calls it if the update is deferred. `key` and `skipped` are those of the step.

        Raises RuntimeError in the second backward pass since the optimizer's last step.
        """
        if self._first is not None:
            raise RuntimeError(
                "FusedSGD supports one backward pass per step: call optimizer.step() or "
                "zero_grad() after each backward pass, and pass all rows of the batch to the head "
                "in one call"
            )
        group = self.group
        self._first = step = RowStep(
            group["lr"], group["weight_decay"], key ^ _ROUNDING, skipped, writes=not self.deferred
        )
        self.squared_norm = walk(step if step.writes or self.needs_norm else None)
        self._again = again if self.deferred else None

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradient by `factor`. Raises RuntimeError if it is already applied."""
        if self._first is not None and not self.deferred:
            raise RuntimeError(
                "the class rows were updated in the backward pass, so their gradient cannot be "
                "scaled or clipped: use FusedSGD(deferred=True)"
            )
        self._factor = self._factor * factor
        if self.squared_norm is not None:
            self.squared_norm = self.squared_norm * factor**2

    def apply(self, divisor: Tensor | None, skipped: Tensor | None) -> None:
        """Apply the update of the last backward pass if it was deferred (collective)."""
        assert not self._is_required, "a backward pass did not visit the class rows"
        first, again = self._first, self._again
        if first is not None and again is not None:
            scale = torch.ones_like(first.skipped, dtype=torch.float32) / self._factor
            again(
                replace(
                    first,
                    lr=self.group["lr"],
                    weight_decay=self.group["weight_decay"],
                    skipped=first.skipped if skipped is None else first.skipped | skipped,
                    divisor=scale if divisor is None else scale * divisor,
                    writes=True,
                )
            )
        self.clear()

    def clear(self) -> None:
        """Forget the last backward pass."""
        self.squared_norm = self._again = self._first = None
        self._is_required, self._factor = False, 1.0
