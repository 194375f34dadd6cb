"""The factored head: exact SGD on all K rows of the classifier at a cost that does not depend on K.

For a loss that depends on a row's logits by sum z, sum z^2 and z_y only (Vincent, de Brebisson and
Bouchard 2015, arXiv 1412.7091; the whole family in 1606.08061). The rows are W = V U + 1 omega';
Q = W'W and s = W'1 give the statistics, and a step changes U, omega, Q, s and the labels' rows of
V. It is plain SGD with weight decay over dense class weights: no momentum, no label trees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from heads.collectives import (
    all_gather_rows,
    all_reduce_max,
    all_reduce_sum,
    group_rank,
    group_size,
    reduce_scatter_rows,
)
from heads.factors import Factors, Moments, RowsGradient
from heads.head import ClassHead
from heads.inputs import Agreement, Parameters, class_ids, nan_loss
from heads.losses import LOSSES, Loss

# Of float64 rows: what a core's cache holds.
_CACHED_BYTES = 2 << 20
# Over 4,000 steps of float32 (quadratic on features of non-negative entries, K = 2,000, d = 64, lr
# 0.1) the rows end 2.9e-7 from those of float64, a plain head's 2.2e-7; with 30 it is 1.4e-6, with
# 100 1.5e-5. The spherical losses drift a third as far as a plain head. Consolidations: 400, 286,
# 211 with quadratic, 11, 8, 6 with spherical_softmax.
_MAX_SINGULAR_VALUE = 10.0
_CHANGED = (
    "the factored head's weight was changed while steps or a gradient stood beside it: call "
    "zero_grad() and fetch head.weight anew before you change it"
)

# Shape legend: K classes, d features, b rows of this rank, m rows of the global batch.


@dataclass(frozen=True)
class _Batch:
    """A forward, and what its backward needs: `rows` [b, d] of W at the labels, and `by_stats`
    [b, 3], the gradient of the global loss by sum z, sum z^2 and z_y."""

    features: Tensor
    labels: Tensor
    rows: Tensor
    moments: Moments
    loss: Tensor
    by_stats: Tensor
    agreement: Agreement
    num_changes: int

    def scaled(self, factor: float | Tensor) -> "_Batch":
        return replace(self, by_stats=self.by_stats * factor)

    def gradient_of_features(self) -> Tensor:
        linear, square, true = self.by_stats.split(1, dim=1)
        by_squares = 2 * square * (self.features.double() @ self.moments.gram)
        return linear * self.moments.total + by_squares + true * self.rows


class FactoredHead(ClassHead):
    """A dense `ClassHead` that its own `step` trains in O(d^2 m + d^3), whatever the classes.

    >>> head = FactoredHead(512, 10_000_000, SphericalSoftmax())
    >>> head(features, labels).backward()  # features' gradients, as from ClassHead
    >>> head.step(lr=0.1, weight_decay=5e-4)

    The weight gets no `.grad`, so optimizers pass it by, and only this head's own `zero_grad`
    forgets what its backward recorded: that of a module around it does not reach it. Reading
    `head.weight`, its rows or the `state_dict` (not `parameters()`) turns it into plain rows first
    (`consolidate`: all K of them); it alone is the head's state. Who writes to it fetches it anew.
    U's singular values stay, up to a common scale, in [1/`max_singular_value`,
    `max_singular_value`]; a step that would leave that consolidates.

    Raises ValueError for a loss outside the family and a `max_singular_value` below 1.
    """

    def __init__(
        self,
        dim: int,
        num_classes: int,
        loss: Loss,
        *,
        mesh: DeviceMesh | None = None,
        seed: int = 0,
        init_std: float = 0.01,
        memory_mib: int = 256,
        class_weights: Tensor | None = None,
        ignore_index: int | None = None,
        max_singular_value: float = _MAX_SINGULAR_VALUE,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._num_stats = _num_statistics(loss)
        if not max_singular_value >= 1:
            raise ValueError(f"max_singular_value is {max_singular_value}: give at least 1")
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
            ignore_index=ignore_index,
            device=device,
            dtype=dtype,
        )
        self.max_singular_value = max_singular_value
        self.num_consolidations = 0
        self._factors: Factors | None = None  # None: the weight is W itself
        self._moments: Moments | None = None  # None: the next forward computes them of all rows
        self._recorded: list[_Batch] = []
        self._gradient: RowsGradient | None = None  # of what is recorded, once it was asked for
        self._num_changes = 0
        self._seen = self._weight_version()
        self.register_state_dict_pre_hook(_consolidate)
        self.register_load_state_dict_pre_hook(_consolidate)

    @torch.compiler.disable
    def forward(
        self, features: Tensor, labels: Tensor, row_weights: Tensor | None = None
    ) -> Tensor:
        """As `ClassHead.forward` (collective); the statistics are always float64.

        Also raises ValueError, on every rank, if only some ranks' weight requires a gradient,
        because a step changes factors that all rows share.
        """
        batch = self._batch(features, labels, row_weights, with_gradient=torch.is_grad_enabled())
        if batch.loss.isnan():
            groups = self.engine.class_group, self.engine.data_group
            raise nan_loss(features, self._held(), None, *groups)
        of_features: Tensor = _OfFeatures.apply(features, self, batch)
        anchor = batch.agreement.anchor(features.device)
        of_weight: Tensor = _OfWeight.apply(self._parameters["weight"], anchor, self, batch)
        return of_features + of_weight

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float = 0.0) -> None:
        """W <- (1 - lr weight_decay) W - lr G with the sum G of the gradients since the last step
        or `zero_grad`; nothing where there are none (collective)."""
        gradient = self._reduced_gradient()
        if gradient is None:
            return
        held, places = self._held(), gradient.places
        factors = self._factors or Factors.identity(held)
        # The dense part of the step is W A + 1 c'.
        linear = (1 - lr * weight_decay) * torch.eye(len(gradient.linear)).to(gradient.linear)
        linear -= lr * gradient.linear
        shift = -lr * gradient.shift
        before = self._rows(held[places]) @ linear + shift
        factors = factors.then(linear, shift)
        inverse = factors.inverse(self.max_singular_value, held.dtype)
        if inverse is None:
            self._fold(factors)
            held[places] = (before - lr * gradient.sparse).to(held.dtype)
        else:
            self._factors = factors
            held[places] = (held[places].double() - lr * gradient.sparse @ inverse).to(held.dtype)
        self._follow(linear, shift, before, self._rows(held[places]))
        self._recorded, self._gradient = [], None
        self._num_changes += 1
        self._seen = self._weight_version()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step."""
        super().zero_grad(set_to_none)
        self._recorded, self._gradient = [], None

    def reduce_gradients(self) -> None:
        """Nothing: what is recorded is summed where it is used."""

    @torch.no_grad()
    def squared_gradient_norm(self) -> Tensor:
        """||G||^2 over all rows of all ranks, a float64 scalar (collective)."""
        gradient = self._reduced_gradient()
        if gradient is None:
            return torch.zeros((), dtype=torch.float64, device=self._held().device)
        moments = self._current_moments()
        rows = self._rows(self._held()[gradient.places])
        sparse = all_reduce_sum(gradient.squared_norm_of_sparse(rows), self.engine.class_group)
        return (sparse + gradient.squared_norm_of_dense(moments)).clamp(min=0)

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the gradients since the last step; the same `factor` on every rank."""
        self._recorded = [batch.scaled(factor) for batch in self._recorded]
        if self._gradient is not None:
            self._gradient = self._gradient.scaled(factor)

    @torch.no_grad()
    def consolidate(self) -> None:
        """Make the weight plain rows: V <- V U + 1 omega', U = I, omega = 0, on this rank alone.

        The next forward computes Q and s from scratch, like a run that starts with these rows.
        Raises ValueError if other code changed the weight while there were pending factors.
        """
        if self._factors is not None:
            self._check_unchanged()
            self._fold(self._factors)
            self._seen = self._weight_version()

    # ---- the weight: V inside, W for whoever reads it ----

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

    def _held(self) -> Tensor:
        """This rank's rows of V."""
        return self._parameters["weight"].detach()  # type: ignore[union-attr]

    def _blocks(self) -> tuple[Tensor, ...]:
        """All of them, in pieces that are few bytes as float64 rows."""
        held = self._held()
        size = _CACHED_BYTES if held.device.type == "cpu" else self.engine.memory_bytes // 4
        return held.split(max(1, size // (8 * held.shape[1])))

    def _rows(self, held: Tensor) -> Tensor:
        """Rows of V -> of W, float64."""
        return held.double() if self._factors is None else self._factors.rows(held)

    def _fold(self, factors: Factors) -> None:
        for block in self._blocks():
            block.copy_(factors.rows(block))
        self._factors = self._moments = None
        self.num_consolidations += 1

    def _weight_version(self) -> tuple[int, int, int]:
        weight = self._held()
        return id(self._parameters["weight"]), weight.data_ptr(), weight._version

    def _check_unchanged(self) -> None:
        if self._seen != self._weight_version():
            raise ValueError(_CHANGED)

    # ---- Q and s ----

    def _current_moments(self) -> Moments:
        """Q and s. If any rank has lost them, all ranks recompute them from all rows
        (collective)."""
        changed = self._seen != self._weight_version()
        broken = changed and (self._factors is not None or bool(self._recorded))
        state = torch.tensor(
            2 if broken else int(changed or self._moments is None), device=self._held().device
        )
        state = self._agreed(state)
        if state == 2:
            raise ValueError(_CHANGED)
        if state == 1 or self._moments is None:
            self._moments = self._moments_of_rows()
            self._num_changes += changed
            self._seen = self._weight_version()
        return self._moments

    def _agreed(self, state: Tensor) -> Tensor:
        """The largest of all ranks' `state` (collective)."""
        return all_reduce_max(
            all_reduce_max(state, self.engine.class_group), self.engine.data_group
        )

    def _moments_of_rows(self) -> Moments:
        if not self.engine.weights.is_plain:
            raise ValueError("classes of a factored head have no parents: append them under -1")
        held = self._held()
        gram = torch.zeros(held.shape[1], held.shape[1], dtype=torch.float64, device=held.device)
        total = torch.zeros_like(gram[0])
        for block in self._blocks():
            rows = self._rows(block)
            gram.addmm_(rows.T, rows)
            total += rows.sum(0)
        packed = all_reduce_sum(torch.cat([gram, total[None]]), self.engine.class_group)
        # The mean over the copies gives all of them the same bits.
        packed = all_reduce_sum(packed, self.engine.data_group) / group_size(self.engine.data_group)
        return Moments(packed[:-1], packed[-1], self.num_classes)

    def _follow(self, linear: Tensor, shift: Tensor, before: Tensor, after: Tensor) -> None:
        """Q and s after W A + 1 c', which the labels' rows [n, d] left from `before` to `after`.

        `after` is what became of them in the weight's own precision, so nothing drifts apart.
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
        weight = self._parameters["weight"]
        assert weight is not None
        agreement = self.engine.agree(features, labels, Parameters(weight), row_weights)
        if agreement.partly_frozen:
            raise ValueError(
                "the factored head's weight requires a gradient on some ranks only: call "
                "head.requires_grad_ with the same value on every rank"
            )
        labels = class_ids(labels)
        features = self.engine.row_weighting.masked(features, labels)
        moments, rows = self._current_moments(), self._label_rows(labels, agreement.sizes)
        x = features.detach().double()
        stats = x @ moments.total, ((x @ moments.gram) * x).sum(1), (x * rows).sum(1)
        columns = [*stats, labels.double()]
        if row_weights is not None:
            columns.append(row_weights.double())
        packed = torch.stack(columns, dim=1)
        sizes = agreement.sizes, agreement.group_sizes
        loss, by_stats = self._value(packed, sizes, with_gradient=with_gradient)
        return _Batch(
            features=features.detach(),
            labels=labels,
            rows=rows,
            moments=moments,
            loss=loss.to(torch.promote_types(features.dtype, torch.float32)),
            by_stats=by_stats,
            agreement=agreement,
            num_changes=self._num_changes,
        )

    def _label_rows(self, labels: Tensor, sizes: list[int]) -> Tensor:
        """W's rows [b, d] at the labels of this rank's rows, zero at an ignored one."""
        group, held = self.engine.class_group, self._held()
        wanted = all_gather_rows(labels, sizes, group)
        rows = torch.zeros(len(wanted), held.shape[1], dtype=torch.float64, device=held.device)
        here, places = self._held_labels(wanted)
        rows[here] = self._rows(held[places])
        return reduce_scatter_rows(rows, sizes, group)

    def _held_labels(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows of `labels` [m] count and have a label of this rank, and those's places."""
        counted = self.engine.row_weighting.counts(labels).nonzero().squeeze(1)
        here, places = self.engine.weights.held.find(labels[counted])
        return counted[here], places

    def _value(
        self, stats: Tensor, sizes: tuple[list[int], list[int]], *, with_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """The loss of the global batch, and its gradient [b, 3] by the statistics of these rows.

        `stats` [b, 4 or 5] are sum z, sum z^2, z_y, the label and the row weight where there are
        any. Without gradient it reads as zero.
        """
        engine, world = self.engine, self._gather(stats, sizes)
        counts = engine.row_weighting.counts(world[:, 3].long())
        labels, *factors = world[counts, 3:].unbind(1)
        rows = engine.rows(labels.long(), torch.float64, *factors)
        leaf = world[:, :3].clone().requires_grad_(with_gradient)
        with torch.set_grad_enabled(with_gradient):
            total = leaf[counts].unbind(1)[3 - self._num_stats :]
            value = self.loss.value(total, rows)
        if not with_gradient:
            return value, torch.zeros_like(stats[:, :3])
        (by_stats,) = torch.autograd.grad(value, leaf)
        start = sum(sizes[1][: group_rank(engine.data_group)])
        start += sum(sizes[0][: group_rank(engine.class_group)])
        return value.detach(), by_stats[start : start + len(stats)]

    def _gather(self, tensor: Tensor, sizes: tuple[list[int], list[int]]) -> Tensor:
        """[b, ...] of each rank -> [m, ...]: the global batch on all."""
        group = all_gather_rows(tensor, sizes[0], self.engine.class_group)
        return all_gather_rows(group, sizes[1], self.engine.data_group)

    # ---- gradients ----

    def _checked(self, batch: _Batch) -> _Batch:
        if torch.is_grad_enabled():
            raise RuntimeError("the head has no second derivative: leave create_graph out")
        if batch.num_changes != self._num_changes:
            raise RuntimeError("the factored head took a step between this forward and backward")
        return batch

    def _record(self, batch: _Batch) -> None:
        # A copy: after backward the features may be overwritten.
        self._recorded.append(replace(batch, features=batch.features.clone()))
        self._gradient = None

    def _reduced_gradient(self) -> RowsGradient | None:
        """The gradient of all that is recorded; collective where it was not asked for before."""
        if self._recorded:
            changed = torch.tensor(self._seen != self._weight_version(), device=self._held().device)
            if self._agreed(changed.long()):
                raise ValueError(_CHANGED)
            if self._gradient is None:
                self._gradient = self._reduce(self._recorded)
        return self._gradient

    def _reduce(self, batches: Sequence[_Batch]) -> RowsGradient:
        engine = self.engine
        features = torch.cat([batch.features for batch in batches])
        by_stats = torch.cat([batch.by_stats for batch in batches])
        labels = torch.cat([batch.labels for batch in batches])
        agreements = [batch.agreement for batch in batches]
        sizes = (
            _added([each.sizes for each in agreements]),
            _added([each.group_sizes for each in agreements]),
        )
        x = features.double()
        linear, square, true = by_stats.split(1, dim=1)
        packed = torch.cat([linear.T @ x, 2 * x.T @ (square * x)])
        all_reduce_sum(all_reduce_sum(packed, engine.class_group), engine.data_group)
        # Labels' rows belong to one rank; features travel in the precision they came in.
        here, places = self._held_labels(self._gather(labels, sizes))
        rows = self._gather(true, sizes)[here] * self._gather(features, sizes)[here].double()
        places, row = places.unique(return_inverse=True)
        sparse = rows.new_zeros(len(places), rows.shape[1]).index_add_(0, row, rows)
        return RowsGradient(packed[0], (packed[1:] + packed[1:].T) / 2, places, sparse)


class _OfFeatures(torch.autograd.Function):
    """The loss of a batch that is computed already, as a function of its features."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, head: FactoredHead, batch: _Batch) -> Tensor:
        ctx.head, ctx.batch = head, batch
        ctx.save_for_backward(features)
        return batch.loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018  raises where the features were changed in place
        scaled = ctx.head._checked(ctx.batch).scaled(grad_loss)
        return scaled.gradient_of_features().to(scaled.features.dtype), None, None


class _OfWeight(torch.autograd.Function):
    """Zero, whose backward records what the batch means to the weight, which gets no `.grad`.

    It is a separate function so that computing only the features' gradient records nothing. The
    `anchor` makes the loss differentiable on every rank or on none.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, anchor: Tensor, head: FactoredHead, batch: _Batch
    ) -> Tensor:
        ctx.head, ctx.batch = head, batch
        return torch.zeros_like(batch.loss)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.batch.agreement.needs_vectors:
            ctx.head._record(ctx.head._checked(ctx.batch).scaled(grad_loss))
        return None, None, None, None


def _num_statistics(loss: Loss) -> int:
    """How many of (sum z, sum z^2, z_y), the last ones, are the loss's statistics."""
    if loss.num_power_sums:
        return loss.num_power_sums
    family = [kind for kind, each in LOSSES.items() if each.num_power_sums]
    raise ValueError(
        f"the factored head cannot train {loss.kind}, which needs every logit by itself: use "
        f"ClassHead, or one of {', '.join(family)}"
    )


def _added(sizes: Sequence[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*sizes, strict=True)]


def _consolidate(head: FactoredHead, *_: Any) -> None:
    head.consolidate()
