"""Checkpoints from earlier versions, which store the bias of the head as a column of its weight."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from heads.dtensors import local, sharded_rows
from tests.ranks import run_on_ranks
from tests.trainer.checkpoint_runs import save_checkpoint
from tests.trainer.training import full_entries, resume, started, take_steps
from trainer.checkpoints.entries import training_entries

CHANGES = {"optimizer": {"kind": "adamw"}, "train__ema": {}, "head__weights__kind": "vtree"}


def joined(rows: Tensor, bias: Tensor) -> Tensor:
    """Return the rows and the bias as one tensor, sharded like `rows`. A step counter is returned
    unchanged.
    """
    if not rows.ndim:
        return rows
    combined = torch.cat([local(rows), local(bias)[:, None]], dim=1)
    if isinstance(rows, DTensor):
        shape = torch.Size((len(rows), rows.shape[1] + 1))
        return sharded_rows(combined, rows.device_mesh, shape)
    return combined


def save_in_the_old_format(shards: Path, root: Path) -> dict[str, np.ndarray]:
    task = started(shards, None, **CHANGES)
    take_steps(task, 2)
    entries = training_entries(task)
    for bias in [name for name in entries if "head.bias" in name]:
        weight = bias.replace("head.bias", "head.weight")
        entries[weight] = joined(entries[weight], entries.pop(bias))
    save_checkpoint(root, entries, {"step": 2}, task.world, keep=1)
    return full_entries(task)


def load(shards: Path, root: Path, **changes: Any) -> dict[str, np.ndarray]:
    task = started(shards, None, **CHANGES, **changes)
    resume(task, root)
    return full_entries(task)


def test_a_bias_stored_as_a_column_of_the_weight_is_loaded_at_any_world_size(glyphs, tmp_path):
    saved = run_on_ranks(2, save_in_the_old_format, glyphs, tmp_path)[0]
    assert np.abs(saved["head.bias"]).max() > 0
    assert "optimizer.head.bias.exp_avg" in saved
    of_head = [name for name in saved if "head." in name]
    for loaded in (
        run_on_ranks(1, load, glyphs, tmp_path),
        run_on_ranks(3, load, glyphs, tmp_path),
    ):
        assert loaded[0].keys() == saved.keys()
        for name in of_head:
            np.testing.assert_array_equal(loaded[0][name], saved[name], err_msg=name)
