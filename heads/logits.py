"""From features and rows of classes to logits, for evaluation, export and serving."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True)
class ClassRows:
    """Rows of some classes: `class_ids` [C], `rows` [C, dim] and, where the head has one, their
    `bias` [C]."""

    class_ids: Tensor
    rows: Tensor
    bias: Tensor | None = None

    def __getitem__(self, part: slice) -> "ClassRows":
        bias = None if self.bias is None else self.bias[part]
        return ClassRows(self.class_ids[part], self.rows[part], bias)

    def to(self, device: torch.device) -> "ClassRows":
        bias = None if self.bias is None else self.bias.to(device)
        return ClassRows(self.class_ids.to(device), self.rows.to(device), bias)


def logits_of(features: Tensor, classes: ClassRows) -> Tensor:
    """`features` [b, dim] -> the logits [b, C] of `classes`, in the rows' precision."""
    return linear(features.to(classes.rows.dtype), classes.rows, classes.bias)
