"""Labels of rows that belong to several classes, or to none, as compressed rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from heads.collectives import all_gather_rows

# Shape legend: b rows, n labels of these rows, k classes of a row.

_ROW = 1 << 31  # above any class ID


@dataclass(frozen=True)
class LabelSets:
    """The set of classes of each of b rows.

    The classes of row i are `labels[offsets[i] : offsets[i + 1]]`. `labels` [n] are class IDs,
    ascending and distinct within a row. `offsets` [b + 1] ascend from 0 to n; the two offsets of an
    empty row are equal. Both are integer tensors on the device of the features.

    >>> LabelSets.of([[3, 7], [], [5]])
    LabelSets(labels=tensor([3, 7, 5]), offsets=tensor([0, 2, 2, 3]))
    """

    labels: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, rows: Sequence[Iterable[SupportsIndex]]) -> "LabelSets":
        """Create the sets from the class IDs of each row: integers in any order."""
        sets = [sorted({*map(index, row)}) for row in rows]
        labels = torch.tensor([class_id for row in sets for class_id in row], dtype=torch.int64)
        return cls.of_sizes(labels, torch.tensor([*map(len, sets)], dtype=torch.int64))

    @classmethod
    def of_sizes(cls, labels: Tensor, sizes: Tensor) -> "LabelSets":
        """Create the sets from `labels` [n] and the number of labels of each row [b]."""
        return cls(labels, pad(sizes.cumsum(0), (1, 0)))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice) -> "LabelSets":
        """Return the sets of consecutive rows. Waits for the device of the offsets."""
        start, stop, _ = rows.indices(len(self))
        offsets = self.offsets[start : max(start, stop) + 1]
        first, last = offsets[0].item(), offsets[-1].item()
        return LabelSets(self.labels[first:last], offsets - first)

    @cached_property
    def sizes(self) -> Tensor:
        """The number of labels of each row [b]."""
        return self.offsets.diff()

    @cached_property
    def row_of_label(self) -> Tensor:
        """The row of each label [n]."""
        return torch.repeat_interleave(self.sizes, output_size=len(self.labels))

    def long(self) -> "LabelSets":
        """Return the sets with int64 tensors."""
        return LabelSets(self.labels.long(), self.offsets.long())

    def to(self, device: torch.device | str) -> "LabelSets":
        """Return the sets on a device."""
        return LabelSets(self.labels.to(device), self.offsets.to(device))

    def sums(self, of_labels: Tensor) -> Tensor:
        """Return the sum [b] over the labels of each row of `of_labels` [n], 0 without labels."""
        return of_labels.new_zeros(len(self)).index_add(0, self.row_of_label, of_labels)

    def contain(self, class_ids: Tensor) -> Tensor:
        """Return for the classes [b, k] whether they are in the set of their row."""
        keys = self.long().row_of_label * _ROW + self.labels
        if not len(keys):
            return torch.zeros_like(class_ids, dtype=torch.bool)
        rows = torch.arange(len(self), device=class_ids.device).unsqueeze(1)
        wanted = rows * _ROW + class_ids
        return keys[torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)] == wanted

    def mapped(self, new_ids: Tensor) -> "LabelSets":
        """Return the sets with the class IDs `new_ids[j]`, which are distinct, instead of j."""
        keys = self.long().row_of_label * _ROW + new_ids[self.labels]
        return LabelSets(keys.sort().values % _ROW, self.offsets)


def class_ids_of(labels: Tensor | LabelSets) -> Tensor:
    """Return the class ID of each label, in the order of the rows."""
    return labels.labels if isinstance(labels, LabelSets) else labels


def concatenate_labels(parts: Sequence[Tensor | LabelSets]) -> Tensor | LabelSets:
    """Concatenate the labels of several batches: all of them label sets, or none."""
    ids, sizes = [], []
    for part in parts:
        ids.append(class_ids_of(part))
        if isinstance(part, LabelSets):
            sizes.append(part.sizes)
    labels = torch.cat(ids)
    return LabelSets.of_sizes(labels, torch.cat(sizes)) if sizes else labels


def all_gather_labels(
    labels: Tensor | LabelSets,
    num_rows: Sequence[int],
    num_labels: Sequence[int],
    group: ProcessGroup | None,
) -> Tensor | LabelSets:
    """Gather the labels of all ranks' rows (collective). `num_rows` and `num_labels` are the
    numbers of rows and of labels of each rank."""
    if isinstance(labels, Tensor):
        return all_gather_rows(labels, num_rows, group)
    if group is None:
        return labels
    sizes = all_gather_rows(labels.sizes, num_rows, group)
    return LabelSets.of_sizes(all_gather_rows(labels.labels, num_labels, group), sizes)
