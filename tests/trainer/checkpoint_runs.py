"""Checkpoints for tests, with entries of every kind, saved and loaded by any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads.dtensors import local, sharded_rows
from tests.ranks import rank_world
from trainer.checkpoints import Checkpoint, CheckpointWriter, find_checkpoint, load_tensors
from trainer.checkpoints.folders import step_folder
from trainer.config import CheckpointConfig
from trainer.world import World

ROWS = {"head.weight": 7, "optimizer.head.weight.momentum": 2, "head.nothing": 0}


def full_entries(step: int) -> dict[str, Tensor]:
    """Return the full tensors that a run would save at a step."""
    draw = torch.Generator().manual_seed(step)
    entries = {name: torch.randn(rows, 3, generator=draw) for name, rows in ROWS.items()}
    entries["backbone.weight"] = torch.randn(5, 4, generator=draw)
    entries["backbone.turned"] = torch.randn(4, 6, generator=draw).T
    entries["backbone.small"] = torch.randn(3, generator=draw).to(torch.bfloat16)
    entries["backbone.flags"] = torch.tensor([True, False, step % 2 == 0])
    entries["optimizer.step"] = torch.tensor(float(step))
    entries["backbone.count"] = torch.tensor(step)
    return entries


def entries_at(step: int, world: World) -> dict[str, Tensor]:
    """Return the same entries with those in `ROWS` sharded by rows over the class axis. The shards
    are uneven, and some ranks have empty ones.
    """
    entries = full_entries(step)
    if world.mesh is not None:
        mesh = world.mesh["class"]
        for name in ROWS:
            full = entries[name]
            chunks = full.chunk(mesh.size()) if len(full) else ()
            index = mesh.get_local_rank()
            mine = chunks[index] if index < len(chunks) else full[:0]
            entries[name] = sharded_rows(mine.clone(), mesh, full.shape)
    return entries


def as_bits(entries: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Return the bytes of this rank's part of every entry."""
    return {
        name: local(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        for name, tensor in entries.items()
    }


def save_steps(
    root: Path,
    steps: list[int],
    options: dict[str, Any] | None = None,
    start_step: int = 0,
    class_ranks: int | None = None,
) -> None:
    """Save a checkpoint of each step in `steps` from all ranks."""
    world = rank_world(class_ranks)
    settings = CheckpointConfig(**(options or {}))
    with CheckpointWriter(root, settings, world, start_step=start_step) as writer:
        for step in steps:
            writer.save(entries_at(step, world), {"step": step})


def save_checkpoint(
    root: Path, entries: dict[str, Tensor], state: dict[str, Any], world: World, *, keep: int
) -> Path:
    """Write one checkpoint in the foreground and delete all but the newest `keep` checkpoints."""
    settings = CheckpointConfig(keep_last=keep, in_background=False)
    with CheckpointWriter(root, settings, world, start_step=state["step"]) as writer:
        writer.save(entries, state)
    return step_folder(root, state["step"])


def load_into_zeros(checkpoint: Checkpoint, world: World) -> dict[str, Tensor]:
    entries = entries_at(0, world)
    for tensor in entries.values():
        local(tensor).zero_()
    load_tensors(checkpoint, entries, world)
    return entries


def verify_newest(root: Path) -> tuple[int | None, list[str]]:
    """Compare every bit of the newest valid checkpoint. Returns its step and the rejected
    checkpoints.
    """
    world = rank_world()
    checkpoint, rejected = find_checkpoint(root, world)
    if checkpoint is None:
        return None, rejected
    loaded = as_bits(load_into_zeros(checkpoint, world))
    expected = as_bits(entries_at(checkpoint.step, world))
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(loaded[name], value, err_msg=f"{checkpoint.folder} {name}")
    return checkpoint.step, rejected
