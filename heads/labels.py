"""Class ids of any integer type, as int64."""

import torch
from torch import Tensor

_LARGEST = torch.iinfo(torch.int64).max


def is_integral(labels: Tensor) -> bool:
    """Whether labels are of an integer type."""
    return not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)


def class_ids(labels: Tensor) -> Tensor:
    """Labels of an integer type as int64, which torch can compare and index with.

    A uint64 above the range of int64 becomes the maximum of int64, which is outside the classes. A
    cast would wrap it to a negative number, possibly to `ignore_index`.
    """
    if labels.dtype != torch.uint64:
        return labels.long()
    ids = labels.view(torch.int64)
    return ids.where(ids >= 0, _LARGEST)
