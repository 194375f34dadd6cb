"""Checkpoints: one folder per step, with tensors in DCP's safetensors format and the rest as JSON.
Nothing is pickled.

A manifest with the size and SHA-256 of every file is written last, then the folder is renamed to
`step-…`. A folder with that name therefore always has a complete manifest. `state.json` contains
the trainer's state (an object with the key `step`), `world_size`, `random_states` (one per rank)
and `best`.
"""

from trainer.checkpoints.find import Checkpoint, find_checkpoint, open_checkpoint
from trainer.checkpoints.folders import committed_folders
from trainer.checkpoints.load import load_tensors, restore_random_state, stored_shapes
from trainer.checkpoints.manifest import FORMAT_VERSION
from trainer.checkpoints.writer import CheckpointWriter

__all__ = [
    "FORMAT_VERSION",
    "Checkpoint",
    "CheckpointWriter",
    "committed_folders",
    "find_checkpoint",
    "load_tensors",
    "open_checkpoint",
    "restore_random_state",
    "stored_shapes",
]
