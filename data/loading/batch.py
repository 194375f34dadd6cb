"""`Batch`, which loaders yield, and `Cursor`, the complete state of a training stream."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Substitute:
    """Sample `index` of the split is bad and was replaced by sample `by`.

    `reason` contains the shard and key. In a stream, `index` is the sample's number, and `by` is
    None because the next sample is used instead.
    """

    index: int
    by: int | None
    reason: str

    def __str__(self) -> str:
        if self.by is None:
            return f"skipped {self.reason}"
        return f"replaced by sample {self.by}: {self.reason}"


@dataclass(frozen=True)
class Cursor:
    """The complete state of a training stream. It determines the remaining samples of the run.

    seed: the seed for the order. samples: the total number of samples that all ranks have consumed,
    which does not depend on the number of ranks. bad: the sorted positions, within the split, of
    the bad samples found so far, at most `data.max_bad_samples`. Each rank finds only the bad
    samples in its own shares; `join` merges them.
    """

    seed: int
    samples: int = 0
    bad: tuple[int, ...] = ()

    def join(self, bad: Iterable[int]) -> "Cursor":
        """Return this cursor with additional bad samples, such as those that other ranks found."""
        return replace(self, bad=tuple(sorted({*self.bad, *bad})))

    def to_json(self) -> dict[str, Any]:
        return {"seed": self.seed, "samples": self.samples, "bad": list(self.bad)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Cursor":
        """Return the cursor that `to_json` stored. `bad` may be missing."""
        return cls(value["seed"], value["samples"]).join(value.get("bad", []))


@dataclass(frozen=True)
class Mixed:
    """The second class of each row that Mixup or CutMix has mixed.

    labels: the second classes, int64 [b], or those of all rows as in `Batch`. weights: the weights
    of the first classes, float32 [b]. offsets: as in `Batch`.
    """

    labels: Tensor
    weights: Tensor
    offsets: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """This rank's share of a global batch. The number of rows b may be 0.

    inputs: `pixel_values` uint8 [b, C, H, W] ([b, crops, C, H, W] for multi-crop evaluation), or
    `input_ids` and `attention_mask` int64 [b, T]. labels: int64 [b] or, if each sample has a set of
    labels, those of all rows, int64 [n], ascending within a row. offsets: None, or where the labels
    of each row begin and the last ones end, int64 [b + 1]. indices: positions in the split, int64
    [b]. mixed: None if no rows are mixed. cursor: the stream's state after this batch, or None in
    evaluation. substitutes: the substitutes for bad samples. For a replaced row, `indices` contains
    the bad sample, but inputs and labels are those of its substitute.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    indices: Tensor
    mixed: Mixed | None = None
    cursor: Cursor | None = None
    substitutes: tuple[Substitute, ...] = ()
    offsets: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows b."""
        return len(self.indices)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with `change` applied to every tensor."""
        mixed = self.mixed and Mixed(
            change(self.mixed.labels),
            change(self.mixed.weights),
            None if self.mixed.offsets is None else change(self.mixed.offsets),
        )
        return replace(
            self,
            inputs={name: change(tensor) for name, tensor in self.inputs.items()},
            labels=change(self.labels),
            indices=change(self.indices),
            mixed=mixed,
            offsets=None if self.offsets is None else change(self.offsets),
        )

    def rows(self, start: int, stop: int) -> "Batch":
        """Return the batch of the rows `start` to `stop - 1`, with views of this one's tensors."""
        rows = slice(start, stop)
        labels, offsets = _rows_of(self.labels, self.offsets, rows)
        mixed = self.mixed
        if mixed is not None:
            second, of_second = _rows_of(mixed.labels, mixed.offsets, rows)
            mixed = Mixed(second, mixed.weights[rows], of_second)
        return replace(
            self,
            inputs={name: tensor[rows] for name, tensor in self.inputs.items()},
            labels=labels,
            indices=self.indices[rows],
            mixed=mixed,
            offsets=offsets,
        )

    def pin_memory(self) -> "Batch":
        """Copy the batch to page-locked memory for asynchronous copies to a GPU.

        `DataLoader` calls this.
        """
        return self.each(Tensor.pin_memory)

    def to(self, device: torch.device) -> "Batch":
        """Move the batch to a device. Copies from page-locked memory are asynchronous.

        The indices stay on the host, because only logs and error messages use them.
        """
        return self.each(
            lambda tensor: (
                tensor if tensor is self.indices else tensor.to(device, non_blocking=True)
            )
        )

    def without_data(self) -> "Batch":
        """Return the batch without the data of its tensors, except for the indices."""
        return self.to(torch.device("meta"))

    def tensors(self) -> list[Tensor]:
        """Return the tensors that `to` moves to a device."""
        of_mixed = [] if self.mixed is None else vars(self.mixed).values()
        tensors = [*self.inputs.values(), self.labels, self.offsets, *of_mixed]
        return [tensor for tensor in tensors if tensor is not None]


def label_tensors(labels: np.ndarray | Sequence[np.ndarray]) -> tuple[Tensor, Tensor | None]:
    """Return the labels and offsets of a `Batch`.

    labels: one per row, int64 [b], or one array per row, int64 [n] each.
    """
    if isinstance(labels, np.ndarray):
        return torch.from_numpy(labels), None
    offsets = np.cumsum([0, *map(len, labels)], dtype=np.int64)
    together = np.concatenate([np.empty(0, np.int64), *labels])
    return torch.from_numpy(together), torch.from_numpy(offsets)


def _rows_of(labels: Tensor, offsets: Tensor | None, rows: slice) -> tuple[Tensor, Tensor | None]:
    if offsets is None:
        return labels[rows], None
    offsets = offsets[rows.start : rows.stop + 1]
    first, end = offsets[[0, -1]].tolist()
    return labels[first:end], offsets - first
