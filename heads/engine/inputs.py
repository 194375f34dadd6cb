"""The inputs of a head: its parameters, a batch and the weights of its rows."""

from typing import NamedTuple

import torch
from torch import Tensor

NOTHING_COUNTS = (
    "the global batch has no rows with a positive weight: pass at least one row with a weight "
    "above 0"
)
# Of a row or a class. Sums and products of larger weights could overflow float32.
LARGEST_WEIGHT = 1e15

# Shape legend: b rows of this rank, d features, n nodes of this rank, K all classes.


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
    """This rank's rows: `features` [b, d], class IDs `labels` [b] and, if given, `row_weights` [b],
    which multiply the weights of the rows."""

    features: Tensor
    labels: Tensor
    row_weights: Tensor | None = None


def weights_of_rows(
    class_weights: Tensor | None, labels: Tensor, factors: Tensor | None
) -> Tensor | None:
    """Return the weights of rows in the mean [b]: the entries of their labels in `class_weights`
    [K] (None: 1), times `factors` [b]. None if all of them are 1.

    Labels outside the classes get an arbitrary weight; `agree` rejects them.
    """
    if class_weights is None:
        return factors
    weights = class_weights[labels.clamp(0, len(class_weights) - 1)]
    return weights if factors is None else weights * factors


def options_of(component: object) -> str:
    """Return the class of a loss or a logit map and its options, as a text that is the same on
    every rank."""
    simple = {
        name: value
        for name, value in sorted(vars(component).items())
        if isinstance(value, bool | int | float | str | None)
    }
    return f"{type(component).__qualname__}({', '.join(f'{k}={v}' for k, v in simple.items())})"
