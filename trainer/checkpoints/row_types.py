"""Loads class rows that a checkpoint stores in another number format than the head.

A run may be resumed, evaluated or exported with another `head.dtype`. Rows are rounded to the
nearest numbers of the new format.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from heads.dtensors import local, sharded_rows
from heads.rows.node_values import FP8, NodeValues, wide_dtype
from trainer.checkpoints.load import StoredTensor

_ROWS = "head.weight"
_SCALES = "head.row_scales"
_ROW_TYPES = {torch.float32, torch.bfloat16, FP8}
_ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class _Conversion:
    """Loaded class rows, or moments of them, and the tensor to which they are converted. `scales`
    are those of fp8 rows."""

    loaded: Tensor
    target: Tensor
    loaded_scales: Tensor | None = None
    target_scales: Tensor | None = None

    def run(self) -> None:
        source = NodeValues(local(self.loaded), _local(self.loaded_scales))
        target = NodeValues(local(self.target), _local(self.target_scales))
        for start in range(0, len(source.held), _ROWS_AT_ONCE):
            part = slice(start, min(start + _ROWS_AT_ONCE, len(source.held)))
            target.write(part, source.read(part).to(wide_dtype(target.held.dtype)))


class RowConversions:
    """Replaces the `entries` of class rows by tensors in the dtype of the checkpoint, to be loaded
    instead; `run` then converts them."""

    def __init__(self, entries: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
        self.targets = dict(entries)
        self._conversions: list[_Conversion] = []
        for name, target in entries.items():
            found = stored[name].dtype if name in stored else target.dtype
            if _is_of_rows(name) and found != target.dtype and {found, target.dtype} <= _ROW_TYPES:
                self._conversions.append(self._conversion(name, target, found))

    def _conversion(self, name: str, target: Tensor, dtype: torch.dtype) -> _Conversion:
        loaded = self.targets[name] = _empty_like(target, dtype)
        if name != _ROWS:
            return _Conversion(loaded, target)
        target_scales, loaded_scales = self.targets.pop(_SCALES, None), None
        if dtype == FP8:
            loaded_scales = _empty_like(target, torch.bfloat16, vector=True)
            self.targets[_SCALES] = loaded_scales
        return _Conversion(loaded, target, loaded_scales, target_scales)

    def run(self) -> None:
        """Convert the loaded tensors."""
        for conversion in self._conversions:
            conversion.run()


def _is_of_rows(name: str) -> bool:
    """Return whether an entry contains class rows, their averages or one of their moments."""
    return name in (_ROWS, f"ema.{_ROWS}") or name.startswith(f"optimizer.{_ROWS}.")


def _empty_like(tensor: Tensor, dtype: torch.dtype, *, vector: bool = False) -> Tensor:
    """Return an uninitialized tensor with the layout of `tensor` [N, d], or a vector [N]."""
    mine = local(tensor)
    shape = mine.shape[:1] if vector else mine.shape
    empty = torch.empty(shape, dtype=dtype, device=mine.device)
    if not isinstance(tensor, DTensor):
        return empty
    return sharded_rows(empty, tensor.device_mesh, tensor.shape[:1] if vector else tensor.shape)


def _local(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else local(tensor)
