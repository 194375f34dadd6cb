"""The inputs of a head: its parameters, a batch and the weights of its rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from heads.label_sets import LabelSets, class_ids_of
from heads.losses import LOSSES, Loss

NOTHING_COUNTS = (
    "the global batch has no rows with a positive weight: pass at least one row with a weight "
    "above 0"
)
NO_LABELS = (
    "no row of the global batch has a label: pass larger batches, or set head.loss.kind to bce, "
    "which also learns from rows without labels"
)
# Of a row or a class. Sums and products of larger weights could overflow float32.
LARGEST_WEIGHT = 1e15

# Shape legend: b rows of this rank, P labels of these rows (P = b without label sets), d features,
# n nodes of this rank, K all classes.


def is_integral(labels: Tensor) -> bool:
    """Return whether labels have an integer dtype."""
    return not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)


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
    """This rank's rows: `features` [b, d], class IDs `labels` [b] or label sets of b rows and, if
    given, `row_weights` [b], which multiply the weights of the rows."""

    features: Tensor
    labels: Tensor | LabelSets
    row_weights: Tensor | None = None


def loss_weights(
    loss: Loss, class_weights: Tensor | None, labels: Tensor | LabelSets, factors: Tensor | None
) -> Tensor | None:
    """Return the weights of a batch in the mean, None if all of them are 1.

    The weights [b] of rows are the entries of their labels in `class_weights` [K] (None: 1), times
    `factors` [b]. With label sets and a loss whose `label_sets` is "labels", these are the weights
    [P] of the labels. Labels outside the classes get an arbitrary weight; `agree` rejects them.
    """
    of_labels = class_weights is not None or loss.label_sets == "labels"
    if isinstance(labels, LabelSets) and factors is not None and of_labels:
        factors = factors.index_select(0, labels.row_of_label)
    if class_weights is None:
        return factors
    weights = class_weights[class_ids_of(labels).clamp(0, len(class_weights) - 1)]
    return weights if factors is None else weights * factors


def check_label_sets(loss: Loss, class_weights: Tensor | None) -> None:
    """Raise ValueError if a head with this loss and these class weights does not support label
    sets."""
    if loss.label_sets == "no":
        kinds = [kind for kind, each in LOSSES.items() if each.label_sets != "no"]
        raise ValueError(
            f"{loss.kind} needs exactly one label per row: for label sets, set head.loss.kind to "
            f"one of {', '.join(kinds)}"
        )
    if class_weights is not None and loss.label_sets != "labels":
        kinds = [kind for kind, each in LOSSES.items() if each.label_sets == "labels"]
        raise ValueError(
            f"{loss.kind} does not support class weights with label sets: set "
            f"head.class_weights=none, or set head.loss.kind to one of {', '.join(kinds)}"
        )


def options_of(component: object) -> str:
    """Return the class of a loss or a logit map and its options, as a text that is the same on
    every rank."""
    simple = {
        name: value
        for name, value in sorted(vars(component).items())
        if isinstance(value, bool | int | float | str | None)
    }
    return f"{type(component).__qualname__}({', '.join(f'{k}={v}' for k, v in simple.items())})"
