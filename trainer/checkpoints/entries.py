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
from trainer.checkpoints import Checkpoint, load_tensors, stored_shapes
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

    Also reads checkpoints of earlier versions, which store the head's bias as the last column of
    its weight. Raises the errors of `load_tensors`.
    """
    columns = _bias_columns(entries, stored_shapes(checkpoint))
    targets = {name: tensor for name, tensor in entries.items() if name not in columns.values()}
    for name in columns:
        entry = entries[name]
        if entry.ndim:
            mine, shape = local(entry), torch.Size((len(entry), entry.shape[1] + 1))
            targets[name] = mine.new_empty((len(mine), shape[1]))
            if isinstance(entry, DTensor):
                targets[name] = sharded_rows(targets[name], entry.device_mesh, shape)
    # The averages of bf16 rows are float32 (`MovingAverage`), and a run with averages loads them
    # into its bf16 rows.
    averages = {
        name: torch.empty_like(tensor, dtype=torch.float32)
        for name, tensor in targets.items()
        if name.startswith(_EMA) and tensor.dtype in (torch.bfloat16, torch.float16)
    }
    load_tensors(checkpoint, targets | averages, world)
    for name, average in averages.items():
        targets[name].copy_(average)
    for weight, bias in columns.items():
        both, weights, column = local(targets[weight]), local(entries[weight]), local(entries[bias])
        if weights.ndim:
            weights.copy_(both[:, :-1])
            column.copy_(both[:, -1])
        else:
            column.copy_(both)


def _bias_columns(
    entries: Mapping[str, Tensor], stored: Mapping[str, torch.Size]
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
        if stored[weight] == ((shape[0], shape[1] + 1) if shape else shape):
            found[weight] = bias
    return found
