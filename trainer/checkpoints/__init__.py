"""Checkpoints: one folder a step, tensors as DCP's safetensors form, all else as JSON; no pickles.

A manifest of sizes and SHA-256 is written last and the folder is renamed into place, so a folder
`step-…` without a sound manifest does not exist. `state.json` holds what the trainer gives (an
object with the key `step`) and `world_size`, `random_states` (one a rank) and `best`.
"""

from trainer.checkpoints.find import Checkpoint, find_checkpoint, open_checkpoint
from trainer.checkpoints.folders import committed_folders
from trainer.checkpoints.load import load_tensors, restore_random_state, stored_shapes
from trainer.checkpoints.manifest import FORMAT_VERSION
from trainer.checkpoints.writer import CheckpointWriter, save_checkpoint

__all__ = [
    "FORMAT_VERSION",
    "Checkpoint",
    "CheckpointWriter",
    "committed_folders",
    "find_checkpoint",
    "load_tensors",
    "open_checkpoint",
    "restore_random_state",
    "save_checkpoint",
    "stored_shapes",
]
