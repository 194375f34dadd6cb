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
from trainer.backbone.batch_norm import persistent_buffers
from trainer.checkpoints import Checkpoint, load_tensors, stored_tensors
from trainer.checkpoints.load import StoredTensor
from trainer.checkpoints.row_types import RowConversions
from trainer.optimizers import create_moments_of, tensors_of
from trainer.task import Task
from trainer.world import World

_EMA = "ema."


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
        weights = _weight_names(task)
        for name, tensor in task.average.averages.items():
            entries[f"{_EMA}{name}"] = _canonical(task, name, tensor, weights)
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
        names = _weight_names(task)
        for name, average in task.average.averages.items():
            average.copy_(_piece(task, name, entries[f"{_EMA}{name}"], names))


def load_entries(checkpoint: Checkpoint, entries: dict[str, Tensor], world: World) -> None:
    """Fill the tensors of `entries` from a checkpoint of any world size (collective).

    Also converts class rows in another number format, and checkpoints of earlier versions, which
    store the head's bias as the last column of its weight. Raises the errors of `load_tensors`,
    and ValueError if both conversions are needed.
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
        targets[weight] = _widened(entries[weight])
    rows = RowConversions(targets, stored)
    load_tensors(checkpoint, rows.targets, world)
    rows.run()
    for weight, bias in columns.items():
        both, weights, column = local(targets[weight]), local(entries[weight]), local(entries[bias])
        weights.copy_(both[:, :-1] if weights.ndim else both)
        column.copy_(both[:, -1] if weights.ndim else both)


def _bias_columns(
    entries: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]
) -> dict[str, str]:
    """Return a map from each entry of the head's weight to the matching entry of its bias, if
    `stored` contains both in one tensor. The optimizer's step counter is a scalar and applies to
    both.
    """
    pairs = {
        name.replace("head.bias", "head.weight"): name
        for name in entries
        if "head.bias" in name and name not in stored
    }
    return {
        weight: bias
        for weight, bias in pairs.items()
        if weight in stored and stored[weight].shape == _widened_shape(entries[weight])
    }


def _widened_shape(tensor: Tensor) -> torch.Size:
    return torch.Size((len(tensor), tensor.shape[1] + 1)) if tensor.ndim else tensor.shape


def _widened(tensor: Tensor) -> Tensor:
    """Return an uninitialized tensor that has one more column than `tensor` and the same layout."""
    if not tensor.ndim:
        return torch.empty_like(tensor)
    mine = local(tensor)
    rows = mine.new_empty((len(mine), mine.shape[1] + 1))
    if isinstance(tensor, DTensor):
        return sharded_rows(rows, tensor.device_mesh, _widened_shape(tensor))
    return rows


def create_moments(task: Task) -> None:
    """Create all optimizer moments, so that `training_entries` contains them."""
    task.strategy.create_moments()
    if task.head_optimizer is not None:
        create_moments_of(task.head_optimizer)


def _weight_names(task: Task) -> set[str]:
    return {name for name, _ in task.backbone.named_parameters()}


def _canonical(task: Task, name: str, piece: Tensor, weights: set[str]) -> Tensor:
    component, _, own = name.partition(".")
    if component == "head":
        return task.head.sharded(piece)
    return task.strategy.canonical(own, piece) if own in weights else piece


def _piece(task: Task, name: str, entry: Tensor, weights: set[str]) -> Tensor:
    component, _, own = name.partition(".")
    if component == "head":
        return local(entry)
    return task.strategy.piece(own, entry) if own in weights else entry
