"""The factored head: exact SGD on all K rows of the classifier at a cost independent of K.

The head supports losses that depend on the logits of a row only through sum z, sum z^2 and z_y
(Vincent, de Brebisson and Bouchard 2015, arXiv 1412.7091; arXiv 1606.08061 describes the general
family). It supports dense class weights and plain SGD with weight decay, but not momentum or label
trees.

The rows are stored as W = V U + 1 omega'. For features x, sum z = x's and sum z^2 = x'Q x with
Q = W'W [d, d] and s = W'1 [d], so the only logits that the loss needs are those of the labels. The
gradient is G = 1 p' + W M + C, where M [d, d] is symmetric and C is zero except in the rows of the
labels. A step W - lr G is therefore W A + 1 c' - lr C with A = I - lr M and c = -lr p:

    U <- U A,  omega <- A omega + c            the dense part; V is not read
    V[labels] <- V[labels] - lr C[labels] U^-1    the sparse part, with the new U

Q and s are updated with d x d matrix products (`heads/factors.py`). U becomes ill-conditioned over
many steps. The head then consolidates: V <- W, U = I, omega = 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from heads.collectives import (
    all_gather_rows,
    all_reduce_max,
    all_reduce_sum,
    group_rank,
    group_size,
    reduce_scatter_rows,
)
from heads.engine.agreement import RowCounts, agree, nan_loss, non_finite_rows
from heads.engine.inputs import Batch, Parameters, loss_weights
from heads.factors import Factors, Moments, RowsGradient
from heads.head import ClassHead
from heads.losses import LOSSES, Loss, Rows

# Size of a block of float64 rows, small enough for the cache of one core.
_CACHED_BYTES = 2 << 20
# Measured over 4,000 float32 steps (loss `quadratic`, non-negative features, K = 2,000, d = 64,
# lr 0.1): with limits of 10, 30 and 100, the distance between the final rows and rows computed in
# float64 is 2.9e-7, 1.4e-6 and 1.5e-5, respectively, and the head consolidates 400, 286 and 211
# times. The distance for a plain head is 2.2e-7. With the spherical losses, the distance is a third
# of a plain head's; spherical_softmax consolidates 11, 8 and 6 times.
_MAX_SINGULAR_VALUE = 10.0
_CHANGED = (
    "the factored head's weight was modified while a step or a gradient was pending: call "
    "zero_grad() and read head.weight again before you modify it"
)

# Shape legend: K classes, d features, b rows of this rank, m rows of the global batch.


@dataclass(frozen=True)
class _Batch:
    """The result of a forward pass, and the data that its backward pass needs.

    `rows` [b, d] are the rows of W at the labels; `by_stats` [b, 3] is the gradient of the global
    loss with respect to sum z, sum z^2 and z_y.
    """

    features: Tensor
    labels: Tensor
    rows: Tensor
    moments: Moments
    loss: Tensor
    by_stats: Tensor
    counts: RowCounts
    num_changes: int

    def scaled(self, factor: float | Tensor) -> "_Batch":
        return replace(self, by_stats=self.by_stats * factor)

    def gradient_of_features(self) -> Tensor:
        linear, square, true = self.by_stats.split(1, dim=1)
        by_squares = 2 * square * (self.features.double() @ self.moments.gram)
        return linear * self.moments.total + by_squares + true * self.rows


class FactoredHead(ClassHead):
    """A dense `ClassHead` with its own `step`, which takes O(d^2 m + d^3) time for any number of
    classes.

    >>> head = FactoredHead(512, 10_000_000, SphericalSoftmax())
    >>> head(features, labels).backward()  # gradients of the features, as with ClassHead
    >>> head.step(lr=0.1, weight_decay=5e-4)

    The weight does not get a `.grad`, so optimizers skip it. Its recorded gradients are cleared
    only by the head's own `zero_grad`, not by the `zero_grad` of a module that contains the head.
    Reading `head.weight`, its rows or the `state_dict` (but not `parameters()`) first consolidates
    all K rows (`consolidate`). The weight is the only state of the head. If you modify it, read
    `head.weight` again after each step. The singular values of U stay, up to a common scale,
    between 1/`max_singular_value` and `max_singular_value`; the head consolidates in any step that
    would leave this range.

    Raises ValueError for an unsupported loss and for a `max_singular_value` below 1.
    """

    supports_row_update = False

    def __init__(
        self,
        dim: int,
        num_classes: int,
        loss: Loss,
        *,
        mesh: DeviceMesh | None = None,
        seed: int = 0,
        init_std: float = 0.01,
        memory_mib: int | None = None,
        class_weights: Tensor | None = None,
        max_singular_value: float = _MAX_SINGULAR_VALUE,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._num_stats = _num_statistics(loss)
        if not max_singular_value >= 1:
            raise ValueError(f"max_singular_value is {max_singular_value}: pass at least 1")
        super().__init__(
            dim,
            num_classes,
            loss,
            bias=False,
            mesh=mesh,
            seed=seed,
            init_std=init_std,
            memory_mib=memory_mib,
            class_weights=class_weights,
            device=device,
            dtype=dtype,
        )
        self.max_singular_value = max_singular_value
        self.num_consolidations = 0
        self._factors: Factors | None = None  # None: the weight is W itself
        self._moments: Moments | None = None  # None: the next forward computes them from all rows
        self._recorded: list[_Batch] = []
        self._gradient: RowsGradient | None = None  # of the recorded batches, computed on demand
        self._num_changes = 0
        self._known_version = self._weight_version()
        self.register_state_dict_pre_hook(_consolidate)
        self.register_load_state_dict_pre_hook(_consolidate)

    @torch.compiler.disable
    def forward(
        self, features: Tensor, labels: Tensor, row_weights: Tensor | None = None
    ) -> Tensor:
        """See `ClassHead.forward` (collective); the statistics are always float64."""
        batch = self._batch(features, labels, row_weights, with_gradient=torch.is_grad_enabled())
        if batch.loss.isnan():
            held = Parameters(self._held())
            raise nan_loss(self.engine, len(features), non_finite_rows(features), held)
        of_features: Tensor = _OfFeatures.apply(features, self, batch)
        of_weight: Tensor = _OfWeight.apply(self._stored(), self, batch)
        return of_features + of_weight

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float = 0.0) -> None:
        """Take an SGD step: W <- (1 - lr weight_decay) W - lr G (collective).

        G is the sum of the gradients since the last step or `zero_grad`. If there are no gradients,
        the weight does not change.
        """
        gradient = self._reduced_gradient()
        if gradient is None:
            return
        held, positions = self._held(), gradient.positions
        factors = self._factors or Factors.identity(held)
        # The dense part of the step is W A + 1 c'.
        linear = (1 - lr * weight_decay) * torch.eye(len(gradient.linear)).to(gradient.linear)
        linear -= lr * gradient.linear
        shift = -lr * gradient.shift
        before = self._rows(held[positions]) @ linear + shift
        factors = factors.then(linear, shift)
        inverse = factors.inverse(self.max_singular_value, held.dtype)
        if inverse is None:
            self._fold(factors)
            held[positions] = (before - lr * gradient.sparse).to(held.dtype)
        else:
            self._factors = factors
            updated = held[positions].double() - lr * gradient.sparse @ inverse
            held[positions] = updated.to(held.dtype)
        self._update_moments(linear, shift, before, self._rows(held[positions]))
        self._recorded, self._gradient = [], None
        self._num_changes += 1
        self._known_version = self._weight_version()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients since the last step."""
        super().zero_grad(set_to_none)
        self._recorded, self._gradient = [], None

    def reduce_gradients(self) -> None:
        """Do nothing: `step` and `squared_gradient_norm` sum the recorded gradients."""

    @torch.no_grad()
    def squared_gradient_norm(self) -> Tensor:
        """Return ||G||^2 over all rows of all ranks, a float64 scalar (collective)."""
        gradient = self._reduced_gradient()
        if gradient is None:
            return torch.zeros((), dtype=torch.float64, device=self._held().device)
        moments = self._current_moments()
        rows = self._rows(self._held()[gradient.positions])
        sparse = all_reduce_sum(gradient.squared_norm_of_sparse(rows), self.engine.class_group)
        return (sparse + gradient.squared_norm_of_dense(moments)).clamp(min=0)

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the gradients since the last step by `factor`, equal on every rank."""
        self._recorded = [batch.scaled(factor) for batch in self._recorded]
        if self._gradient is not None:
            self._gradient = self._gradient.scaled(factor)

    @torch.no_grad()
    def consolidate(self) -> None:
        """Convert the weight to plain rows: V <- V U + 1 omega', U = I, omega = 0.

        This is not a collective. The next forward pass computes Q and s from scratch, as in a run
        that starts from these rows. Raises ValueError if other code modified the weight while
        factors were pending.
        """
        if self._factors is not None:
            if self._known_version != self._weight_version():
                raise ValueError(_CHANGED)
            self._fold(self._factors)
            self._known_version = self._weight_version()

    # ---- the weight: stored as V, read as W ----

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self.__dict__.get("_factors") is not None:
            self.consolidate()
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        self.consolidate()
        return self.__dict__.copy()

    def _apply(self, fn: Any, recurse: bool = True) -> "FactoredHead":
        self.consolidate()
        super()._apply(fn, recurse)
        return self

    def _stored(self) -> nn.Parameter:
        """Return the parameter as it is, without consolidating."""
        stored = super().__getattr__("weight")
        assert isinstance(stored, nn.Parameter)
        return stored

    def _held(self) -> Tensor:
        """Return this rank's rows of V."""
        return self._stored().detach()

    def _blocks(self) -> tuple[Tensor, ...]:
        """Return this rank's rows of V in blocks, so that float64 copies need little memory."""
        held = self._held()
        size = _CACHED_BYTES if held.device.type == "cpu" else self.engine.logit_bytes // 4
        return held.split(max(1, size // (8 * held.shape[1])))

    def _rows(self, held: Tensor) -> Tensor:
        """Convert rows of V to float64 rows of W."""
        return held.double() if self._factors is None else self._factors.rows(held)

    def _fold(self, factors: Factors) -> None:
        for block in self._blocks():
            block.copy_(factors.rows(block))
        self._factors = self._moments = None
        self.num_consolidations += 1

    def _weight_version(self) -> tuple[int, int, int]:
        weight = self._held()
        return id(self._stored()), weight.data_ptr(), weight._version

    # ---- Q and s ----

    def _current_moments(self) -> Moments:
        """Return Q and s (collective).

        If the moments of any rank are invalid, all ranks recompute them from all rows.
        """
        changed = self._known_version != self._weight_version()
        broken = changed and (self._factors is not None or bool(self._recorded))
        own = 2 if broken else int(changed or self._moments is None)
        state = torch.tensor(own, device=self._held().device)
        for group in self.engine.groups:
            all_reduce_max(state, group)
        if state == 2:
            raise ValueError(_CHANGED)
        if state == 1 or self._moments is None:
            self._moments = self._moments_of_rows()
            self._num_changes += changed
            self._known_version = self._weight_version()
        return self._moments

    def _moments_of_rows(self) -> Moments:
        if not self.engine.weights.is_plain:
            raise ValueError("classes of a factored head have no parents: pass -1 for each class")
        held = self._held()
        gram = torch.zeros(held.shape[1], held.shape[1], dtype=torch.float64, device=held.device)
        total = torch.zeros_like(gram[0])
        for block in self._blocks():
            rows = self._rows(block)
            gram.addmm_(rows.T, rows)
            total += rows.sum(0)
        packed = all_reduce_sum(torch.cat([gram, total[None]]), self.engine.class_group)
        # Average over the replicas, so that their moments are bitwise equal.
        packed = all_reduce_sum(packed, self.engine.data_group) / group_size(self.engine.data_group)
        return Moments(packed[:-1], packed[-1], self.num_classes)

    def _update_moments(self, linear: Tensor, shift: Tensor, before: Tensor, after: Tensor) -> None:
        """Update Q and s for the dense part W A + 1 c' and for the rows of the labels.

        The dense part alone would set these rows [n, d] to `before`. Their new values are `after`,
        rounded to the dtype of the weight. Q and s thus include these rounding errors and do not
        drift away from the rows.
        """
        sparse = after - before
        cross = before.T @ sparse
        packed = torch.cat([cross + cross.T + sparse.T @ sparse, sparse.sum(0, keepdim=True)])
        all_reduce_sum(packed, self.engine.class_group)
        if self._moments is not None:
            self._moments = self._moments.then(linear, shift).plus(packed[:-1], packed[-1])

    # ---- one batch ----

    @torch.no_grad()
    def _batch(
        self,
        features: Tensor,
        labels: Tensor,
        row_weights: Tensor | None,
        *,
        with_gradient: bool,
    ) -> _Batch:
        weight = self._stored()
        with torch.set_grad_enabled(with_gradient):  # the ranks must agree on it, too
            counts, _ = agree(self.engine, Batch(features, labels, row_weights), Parameters(weight))
        labels = labels.long()
        moments, rows = self._current_moments(), self._label_rows(labels, counts.sizes)
        x = features.detach().double()
        stats = x @ moments.total, ((x @ moments.gram) * x).sum(1), (x * rows).sum(1)
        columns = [*stats, labels.double()]
        if row_weights is not None:
            columns.append(row_weights.double())
        packed = torch.stack(columns, dim=1)
        loss, by_stats = self._value(packed, counts, with_gradient=with_gradient)
        return _Batch(
            features=features.detach(),
            labels=labels,
            rows=rows,
            moments=moments,
            loss=loss.to(torch.promote_types(features.dtype, torch.float32)),
            by_stats=by_stats,
            counts=counts,
            num_changes=self._num_changes,
        )

    def _label_rows(self, labels: Tensor, sizes: list[int]) -> Tensor:
        """Return the rows [b, d] of W at this rank's labels.

        Every rank fills in the rows that it holds for the labels of the entire class group. The
        reduce-scatter then gives each rank the rows of its own labels.
        """
        group, held = self.engine.class_group, self._held()
        all_labels = all_gather_rows(labels, sizes, group)
        rows = torch.zeros(len(all_labels), held.shape[1], dtype=torch.float64, device=held.device)
        here, positions = self.engine.weights.held.find(all_labels)
        rows[here] = self._rows(held[positions])
        return reduce_scatter_rows(rows, sizes, group)

    def _value(
        self, stats: Tensor, counts: RowCounts, *, with_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of the global batch, and its gradient [b, 3] with respect to the
        statistics of this rank's rows.

        The gradient is zero if `with_gradient` is false. The columns of `stats` [b, 4 or 5] are
        sum z, sum z^2, z_y, the label and, if given, the row weight.
        """
        engine, world = self.engine, counts.gather(self.engine, stats)
        labels, *given = world[:, 3:].unbind(1)
        factors = given[0] if given else None
        weights = loss_weights(self.loss, engine.class_weights, labels.long(), factors)
        if weights is not None:
            weights = weights.double()
        rows = Rows(engine.num_classes, labels.long(), weights)
        leaf = world[:, :3].clone().requires_grad_(with_gradient)
        with torch.set_grad_enabled(with_gradient):
            total = leaf.unbind(1)[3 - self._num_stats :]
            value = self.loss.value(total, rows)
        if not with_gradient:
            return value, torch.zeros_like(stats[:, :3])
        (by_stats,) = torch.autograd.grad(value, leaf)
        start = sum(counts.group_sizes[: group_rank(engine.data_group)])
        start += sum(counts.sizes[: group_rank(engine.class_group)])
        return value.detach(), by_stats[start : start + len(stats)]

    # ---- gradients ----

    def _checked(self, batch: _Batch) -> _Batch:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the head does not support second derivatives: call backward without create_graph"
            )
        if batch.num_changes != self._num_changes:
            raise RuntimeError(
                "the factored head took a step between this forward and its backward: call "
                "backward before step"
            )
        return batch

    def _record(self, batch: _Batch) -> None:
        # Clone: the caller may overwrite the features after backward.
        self._recorded.append(replace(batch, features=batch.features.clone()))
        self._gradient = None

    def _reduced_gradient(self) -> RowsGradient | None:
        """Return the gradient of the recorded batches, or None without batches (collective)."""
        if not self._recorded:
            return None
        self._current_moments()  # raises ValueError if a rank has modified the weight
        if self._gradient is None:
            self._gradient = self._reduce(self._recorded)
        return self._gradient

    def _reduce(self, batches: Sequence[_Batch]) -> RowsGradient:
        engine = self.engine
        features = torch.cat([batch.features for batch in batches])
        by_stats = torch.cat([batch.by_stats for batch in batches])
        labels = torch.cat([batch.labels for batch in batches])
        counts = RowCounts(
            *(
                [sum(column) for column in zip(*sizes, strict=True)]
                for sizes in zip(*(batch.counts for batch in batches), strict=True)
            )
        )
        x = features.double()
        linear, square, true = by_stats.split(1, dim=1)
        packed = torch.cat([linear.T @ x, 2 * x.T @ (square * x)])
        all_reduce_sum(all_reduce_sum(packed, engine.class_group), engine.data_group)
        # The rank that holds the row of a label needs the features of all batch rows with that
        # label. Gather the features in their original dtype to send fewer bytes.
        all_labels, all_true, all_features = (
            counts.gather(engine, each) for each in (labels, true, features)
        )
        here, positions = engine.weights.held.find(all_labels)
        rows = all_true[here] * all_features[here].double()
        positions, row = positions.unique(return_inverse=True)
        sparse = rows.new_zeros(len(positions), rows.shape[1]).index_add_(0, row, rows)
        return RowsGradient(packed[0], (packed[1:] + packed[1:].T) / 2, positions, sparse)


class _OfFeatures(torch.autograd.Function):
    """The loss of a computed batch, as a function of its features."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, head: FactoredHead, batch: _Batch) -> Tensor:
        ctx.head, ctx.batch = head, batch
        ctx.save_for_backward(features)
        return batch.loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018  raises if the features were modified in place
        scaled = ctx.head._checked(ctx.batch).scaled(grad_loss)
        return scaled.gradient_of_features().to(scaled.features.dtype), None, None


class _OfWeight(torch.autograd.Function):
    """A zero whose backward records the batch's gradient of the weight instead of setting `.grad`.

    This is a separate function so that `torch.autograd.grad` with respect to the features alone
    records nothing.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, head: FactoredHead, batch: _Batch) -> Tensor:
        ctx.head, ctx.batch = head, batch
        return torch.zeros_like(batch.loss)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        ctx.head._record(ctx.head._checked(ctx.batch).scaled(grad_loss))
        return None, None, None


def _num_statistics(loss: Loss) -> int:
    """Return n such that the statistics of the loss are the last n of (sum z, sum z^2, z_y)."""
    if loss.num_power_sums:
        return loss.num_power_sums
    family = [kind for kind, each in LOSSES.items() if each.num_power_sums]
    raise ValueError(
        f"the factored head does not support {loss.kind}, which needs individual logits: use "
        f"ClassHead, or one of the losses {', '.join(family)}"
    )


def _consolidate(head: FactoredHead, *_: Any) -> None:
    head.consolidate()
