"""The tensors of a task in a checkpoint, by name. Names do not depend on the strategy or world
size.

backbone.…  head.…                    weights and buffers
optimizer.backbone.….exp_avg          an optimizer's moment of a weight
ema.backbone.…  ema.head.…            moving averages
"""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from heads.dtensors import local, sharded_rows
from heads.rows.node_values import FP8, NodeValues, wide_dtype
from trainer.backbone.batch_norm import persistent_buffers
from trainer.checkpoints import Checkpoint, load_tensors, stored_tensors
from trainer.checkpoints.load import StoredTensor
from trainer.optimizers import create_moments_of, tensors_of
from trainer.task import Task
from trainer.world import World

_EMA = "ema."
_ROWS, _SCALES = "head.weight", "head.row_scales"
_ROW_TYPES = {torch.float32, torch.bfloat16, FP8}
_ROWS_AT_ONCE = 8192


def model_entries(task: Task) -> dict[str, Tensor]:
    """Return the weights and buffers without copying them, as full tensors or `Shard(0)` DTensors
    (collective).
    """
    backbone = task.strategy.weights() | persistent_buffers(task.backbone)
    entries = {f"backbone.{name}": tensor.detach() for name, tensor in backbone.items()}
    for name, tensor in task.head.state_dict().items():
        entries[f"head.{name}"] = task.head.sharded(tensor)
    return entries


def averaged_entries(task: Task) -> dict[str, Tensor]:
    """Return the model's entries under the names of their moving averages. A run with `train.ema`
    is evaluated with these averages.
    """
    averaged = task.live()
    return {
        f"{_EMA}{name}" if name in averaged else name: tensor
        for name, tensor in model_entries(task).items()
    }


def training_entries(task: Task) -> dict[str, Tensor]:
    """Return all tensors from which a run resumes: weights, buffers, optimizer moments and moving
    averages (collective).
    """
    entries = model_entries(task)
    for name, moments in task.strategy.moments().items():
        for key, value in moments.items():
            entries[f"optimizer.backbone.{name}.{key}"] = value
    if task.head_optimizer is not None:
        for name, parameter in task.head.named_parameters():
            for key, value in tensors_of(task.head_optimizer, parameter).items():
                entries[f"optimizer.head.{name}.{key}"] = task.head.sharded(value)
    if task.average is not None:
        names = {name for name, _ in task.backbone.named_parameters()}
        for name, piece in task.average.averages.items():
            component, _, own = name.partition(".")
            if component == "head":
                piece = task.head.sharded(piece)
            elif own in names:
                piece = task.strategy.canonical(own, piece)
            entries[f"{_EMA}{name}"] = piece
    return entries


def restore_training(task: Task, entries: Mapping[str, Tensor]) -> None:
    """Copy loaded `training_entries` to `task` (collective)."""
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for entry, tensor in entries.items():
        name, _, key = entry.removeprefix("optimizer.backbone.").rpartition(".")
        if entry.startswith("optimizer.backbone."):
            moments[name][key] = tensor
        elif entry.startswith("backbone."):
            weights[entry.removeprefix("backbone.")] = tensor
    task.strategy.restore(weights, moments)
    if task.average is not None:
        names = {name for name, _ in task.backbone.named_parameters()}
        for name, average in task.average.averages.items():
            component, _, own = name.partition(".")
            loaded = entries[f"{_EMA}{name}"]
            if component == "head":
                loaded = local(loaded)
            elif own in names:
                loaded = task.strategy.piece(own, loaded)
            average.copy_(loaded)


def create_moments(task: Task) -> None:
    """Create all optimizer moments, so that `training_entries` contains them."""
    task.strategy.create_moments()
    if task.head_optimizer is not None:
        create_moments_of(task.head_optimizer)


# ---------------------------------------------------------------- loading


def load_entries(checkpoint: Checkpoint, entries: dict[str, Tensor], world: World) -> None:
    """Fill the tensors of `entries` from a checkpoint of any world size (collective).

    Also converts class rows that the checkpoint stores in another number format, because a run may
    be resumed, evaluated or exported with another `head.dtype`, and checkpoints of earlier
    versions, which store the head's bias as the last column of its weight. Raises the errors of
    `load_tensors`, and ValueError if both conversions are needed.
    """
    stored = stored_tensors(checkpoint)
    columns = _bias_columns(entries, stored)
    if any(entries[weight].ndim and entries[weight].itemsize < 4 for weight in columns):
        raise ValueError(
            f"checkpoint {checkpoint.folder} is from a version without bf16 and fp8 rows: resume "
            "it with head.dtype=fp32, and change the type after the next checkpoint"
        )
    targets = {name: tensor for name, tensor in entries.items() if name not in columns.values()}
    for weight in columns:
        entry = entries[weight]
        targets[weight] = _rows_like(entry, entry.shape[1] + 1) if entry.ndim else entry
    conversions = _conversions(targets, stored)
    load_tensors(checkpoint, targets, world)
    for loaded, rows in conversions:
        for start in range(0, len(loaded.held), _ROWS_AT_ONCE):
            part = slice(start, min(start + _ROWS_AT_ONCE, len(loaded.held)))
            rows.write(part, loaded.read(part).to(wide_dtype(rows.held.dtype)))
    for weight, bias in columns.items():
        both, weights, column = local(targets[weight]), local(entries[weight]), local(entries[bias])
        if weights.ndim:
            weights.copy_(both[:, :-1])
            column.copy_(both[:, -1])
        else:
            column.copy_(both)


def _bias_columns(
    entries: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]
) -> dict[str, str]:
    """Return a map from each entry of the head's weight to the matching entry of its bias, if
    `stored` contains both in one tensor. The optimizer's step counter is a scalar and applies to
    both.
    """
    found = {}
    for bias in entries:
        weight = bias.replace("head.bias", "head.weight")
        if weight == bias or bias in stored or weight not in stored:
            continue
        shape = entries[weight].shape
        if stored[weight].shape == ((shape[0], shape[1] + 1) if shape else shape):
            found[weight] = bias
    return found


def _conversions(
    targets: dict[str, Tensor], stored: Mapping[str, StoredTensor]
) -> list[tuple[NodeValues, NodeValues]]:
    """Replace the class rows in `targets`, their averages and their moments by tensors in the
    format of the checkpoint. Return pairs of these tensors and those to which they are converted
    after loading. Rows are rounded to the nearest numbers of the new format.
    """
    pairs = []
    for name, target in list(targets.items()):
        dtype = stored[name].dtype if name in stored else target.dtype
        is_of_rows = name in (_ROWS, f"{_EMA}{_ROWS}") or name.startswith(f"optimizer.{_ROWS}.")
        if not is_of_rows or dtype == target.dtype or not {dtype, target.dtype} <= _ROW_TYPES:
            continue
        loaded = targets[name] = _rows_like(target, target.shape[1], dtype)
        scales = loaded_scales = None
        if name == _ROWS:
            scales = targets.pop(_SCALES, None)
            if dtype == FP8:
                loaded_scales = targets[_SCALES] = _rows_like(target, None, torch.bfloat16)
        pairs.append((_values(loaded, loaded_scales), _values(target, scales)))
    return pairs


def _values(rows: Tensor, scales: Tensor | None) -> NodeValues:
    return NodeValues(local(rows), None if scales is None else local(scales))


def _rows_like(tensor: Tensor, columns: int | None, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized tensor with the rows and the layout of `tensor` [N, d]: a matrix [N,
    columns], or a vector [N] if `columns` is None."""
    mine = local(tensor)
    rest = () if columns is None else (columns,)
    empty = mine.new_empty((len(mine), *rest), dtype=dtype)
    if not isinstance(tensor, DTensor):
        return empty
    return sharded_rows(empty, tensor.device_mesh, torch.Size((len(tensor), *rest)))
