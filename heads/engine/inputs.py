"""The inputs of a head: its parameters, a batch and the weights of its rows."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_gather_rows
from heads.losses.base import Rows

NOTHING_COUNTS = (
    "the global batch has no rows with a positive weight: pass at least one row that is not "
    "ignored and has a weight above 0"
)
_LARGEST = torch.iinfo(torch.int64).max
# Of a row or a class. Sums and products of larger weights could overflow float32.
LARGEST_WEIGHT = 1e15

# Shape legend: b rows of this rank, G rows of the class group, m rows of the global batch, d
# features, n nodes of this rank, K all classes.


def is_integral(labels: Tensor) -> bool:
    """Return whether labels have an integer dtype."""
    return not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)


def class_ids(labels: Tensor) -> Tensor:
    """Convert integer labels to int64, which torch supports in comparisons and as indices.

    A uint64 above the range of int64 becomes the maximum of int64, which is outside the classes. A
    cast would wrap it to a negative number, possibly to `ignore_index`.
    """
    if labels.dtype != torch.uint64:
        return labels.long()
    ids = labels.view(torch.int64)
    return ids.where(ids >= 0, _LARGEST)


class Parameters(NamedTuple):
    """The parameters of a head that this rank holds.

    These are the node vectors [n, d], the bias of the nodes [n], and two scalars: the logarithm of
    the scale, and the offset. A parameter that is not learned is None. `row_scales` [n] are the
    scales of fp8 node vectors, which are not learned.
    """

    vectors: Tensor
    bias: Tensor | None = None
    log_scale: Tensor | None = None
    offset: Tensor | None = None
    row_scales: Tensor | None = None


class Required(NamedTuple):
    """Which gradients are required: that of the features, and those of the `Parameters`."""

    features: bool
    vectors: bool
    bias: bool
    log_scale: bool
    offset: bool

    @classmethod
    def of(cls, features: object, parameters: Parameters) -> "Required":
        enabled, inputs = torch.is_grad_enabled(), (features, *parameters[:4])
        return cls(*(enabled and isinstance(x, Tensor) and x.requires_grad for x in inputs))

    def names(self) -> list[str]:
        return [name for name, is_required in self._asdict().items() if is_required]


class Batch(NamedTuple):
    """This rank's rows: `features` [b, d], class IDs `labels` [b] and, if given, `row_weights` [b],
    which multiply the weights of the rows."""

    features: Tensor
    labels: Tensor
    row_weights: Tensor | None = None

    def with_wide_weights(self) -> "Batch":
        """Return the batch with its row weights in the dtype of the loss, at least float32, in
        which a small weight may become 0."""
        features, _, weights = self
        if not all(isinstance(x, Tensor) and x.is_floating_point() for x in (features, weights)):
            return self  # no weights, or invalid ones
        assert weights is not None
        dtype = torch.promote_types(features.dtype, torch.float32)
        return self._replace(row_weights=weights.to(dtype))


@dataclass(frozen=True)
class RowWeighting:
    """The weight of each row in the mean: the entry of its label in `class_weights` [K] (None: 1),
    or 0 if the label is `ignore_index`."""

    class_weights: Tensor | None = None
    ignore_index: int | None = None

    @property
    def is_uniform(self) -> bool:
        """Whether every row has the weight 1."""
        return self.class_weights is None and self.ignore_index is None

    def counts(self, labels: Tensor) -> Tensor:
        """Return a mask of the rows that are not ignored, bool [b]."""
        if self.ignore_index is None:
            return torch.ones_like(labels, dtype=torch.bool)
        return labels != self.ignore_index

    def __call__(self, labels: Tensor, factors: Tensor | None = None) -> Tensor:
        """Return the weights of rows [b], times `factors` [b].

        Labels outside the classes get an arbitrary weight; `agree` rejects them.
        """
        counts = self.counts(labels)
        weights = counts.to(torch.float32)
        if self.class_weights is not None:
            known = labels.clamp(0, len(self.class_weights) - 1)
            weights = torch.where(counts, self.class_weights[known], 0)
        return weights if factors is None else weights * factors

    def rows(
        self,
        num_classes: int,
        labels: Tensor,
        dtype: torch.dtype,
        *,
        factors: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Rows:
        """Return the `Rows` with these labels [m] that `Loss.value` needs.

        `factors` [m] are their `row_weights`, if given. `counts` [m] is false for ignored rows
        (None: there are none), whose labels must be valid.
        """
        if self.class_weights is None and factors is None and counts is None:
            return Rows(num_classes, labels)
        weights = self(labels, factors).to(dtype)
        if counts is not None:
            weights = weights.where(counts, 0)
        return Rows(num_classes, labels, weights, counts)

    def masked(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return `features` [b, d] with zeros in the ignored rows.

        Ignored rows may contain NaN, and 0 times NaN is NaN.
        """
        if self.ignore_index is None:
            return features
        return features.where(self.counts(labels).unsqueeze(1), 0)

    def to(self, device: torch.device) -> "RowWeighting":
        weights = self.class_weights
        return replace(self, class_weights=None if weights is None else weights.to(device))


@dataclass(frozen=True)
class GlobalRows:
    """Labels of the gathered rows.

    `labels_G` are the labels of the class group. `labels_m` and `weights_m` are the labels and the
    `row_weights` of the rows of the global batch. If rows may be ignored, `counts` [m] is false for
    ignored rows, and `sources` [m] are the positions of the rows that replace them: see `Rows`.
    """

    labels_G: Tensor
    labels_m: Tensor
    weights_m: Tensor | None
    counts: Tensor | None = None
    sources: Tensor | None = None

    @classmethod
    def gather(
        cls,
        batch: Batch,
        weighting: RowWeighting,
        sizes: list[int],
        group_sizes: list[int],
        class_group: ProcessGroup | None,
        data_group: ProcessGroup | None,
    ) -> "GlobalRows":
        """Gather this rank's labels and row weights over both groups (collective). See `RowCounts`
        for `sizes` and `group_sizes`."""
        row_weights = batch.row_weights
        labels_G = all_gather_rows(batch.labels, sizes, class_group)
        labels_m = all_gather_rows(labels_G, group_sizes, data_group)
        if row_weights is not None:
            row_weights = all_gather_rows(row_weights, sizes, class_group)
            row_weights = all_gather_rows(row_weights, group_sizes, data_group)
        if weighting.ignore_index is None:
            return cls(labels_G, labels_m, row_weights)
        # An ignored row needs a valid class to compute its statistics. Any class will do, because
        # the loss does not use them.
        known_G = labels_G.where(weighting.counts(labels_G), 0)
        counts = weighting.counts(labels_m)
        # Removing the ignored rows would make the host wait for their number. The statistics of a
        # row of zeros may have an infinite loss, and 0 times infinity is NaN, so a row that counts
        # replaces each of them.
        sources = torch.arange(len(counts), device=counts.device)
        sources = sources.where(counts, counts.int().argmax())
        return cls(known_G, labels_m.where(counts, 0)[sources], row_weights, counts, sources)

    def num_rows(self, *, exact: bool) -> int:
        """Return the number of rows that are not ignored, or, without reading from the device, an
        upper bound."""
        if self.counts is None or not exact:
            return len(self.labels_m)
        return int(self.counts.sum())


def options_of(component: object) -> str:
    """Return the class of a loss or a logit map and its options, as a text that is the same on
    every rank."""
    simple = {
        name: value
        for name, value in sorted(vars(component).items())
        if isinstance(value, bool | int | float | str | None)
    }
    return f"{type(component).__qualname__}({', '.join(f'{k}={v}' for k, v in simple.items())})"
