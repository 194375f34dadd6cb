"""Checkpoints: one folder a step, tensors as DCP's safetensors form, all else as JSON.

A manifest of sizes and SHA-256 is written last and the folder is renamed into place, so a folder
`step-…` without a sound manifest does not exist. Nothing here is a pickle.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from heads.collectives import all_gather_equal, all_reduce_max
from trainer.world import World

FORMAT_VERSION = 1
_MANIFEST = "manifest.json"
_STATE = "state.json"
_NO_CHECKPOINT = -1


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: its folder, its step and what is no tensor in it."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        step: int = self.state["step"]
        return step


def save_checkpoint(
    root: Path, entries: dict[str, Tensor], state: dict[str, Any], world: World, *, keep: int
) -> Path:
    """Write `root/step-…` from all ranks, publish it at once, drop all but the newest `keep`.

    `state` is JSON with the key `step`; every rank's random state is added to it (collective).
    """
    folder = root / f"step-{state['step']:08d}"
    aside = root / f"{folder.name}.partial"
    if world.is_main:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    world.barrier()
    with _single_process_is_meant():
        try:
            dcp.save(
                entries,
                storage_writer=HuggingFaceStorageWriter(str(aside), save_distributed=True),
                no_dist=world.size == 1,
            )
        except CheckpointException as error:
            # A BaseException with every rank's traceback; the first cause is what a person needs.
            rank, (cause, _) = next(iter(error.failures.items()))
            raise OSError(
                f"checkpoint {aside} could not be written on rank {rank}: {cause}"
            ) from None
    random_states = _gather_random_states(world)
    if world.is_main:
        whole = {**state, "world_size": world.size, "random_states": random_states}
        (aside / _STATE).write_text(json.dumps(whole, indent=1), encoding="utf-8")
        _commit(aside, folder)
        # Folders of later steps are what a resume refused: they must not push sound ones out.
        for old in [path for path in committed_folders(root) if path.name <= folder.name][:-keep]:
            shutil.rmtree(old)
    world.barrier()
    return folder


def find_checkpoint(root: Path, world: World) -> tuple[Checkpoint | None, list[str]]:
    """The newest sound checkpoint under `root`, the same on every rank, and what was refused.

    Rank 0 verifies every file against the manifest; the others take its word (collective).
    """
    found, refused = None, []
    if world.is_main:
        for folder in reversed(committed_folders(root)):
            try:
                found = open_checkpoint(folder)
                break
            except ValueError as error:
                refused.append(str(error))
    newest = torch.tensor(found.step if found else _NO_CHECKPOINT, device=world.device)
    step = int(all_reduce_max(newest, world.group))
    if step != _NO_CHECKPOINT and not world.is_main:
        folder = root / f"step-{step:08d}"
        found = Checkpoint(folder, _read_json(folder / _STATE))
    return found, refused


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint whose every file is as it was written.

    Raises ValueError naming the folder and the file that is missing, added or altered.
    """
    manifest = _read_json(folder / _MANIFEST)
    version, listed = manifest.get("format_version"), manifest.get("files")
    if not isinstance(version, int) or not isinstance(listed, dict):
        raise ValueError(f"checkpoint {folder}: {_MANIFEST} is unreadable: not a manifest")
    if version > FORMAT_VERSION:
        raise ValueError(f"checkpoint {folder} has a newer format than this kway: update kway")
    present = {path.name for path in folder.iterdir()} - {_MANIFEST}
    for name in sorted(set(listed) ^ present):
        what = "is missing" if name in listed else "does not belong there"
        raise ValueError(f"checkpoint {folder}: {name} {what}; delete the folder to go on without")
    for name, expected in listed.items():
        if _fingerprint(folder / name) != expected:
            raise ValueError(
                f"checkpoint {folder}: {name} is not what was written (SHA-256 differs); "
                "delete the folder to go on without it"
            )
    return Checkpoint(folder, _read_json(folder / _STATE))


def load_tensors(checkpoint: Checkpoint, entries: dict[str, Tensor], world: World) -> None:
    """Fill `entries` in place from a checkpoint of any world size (collective).

    Raises ValueError naming tensors that the checkpoint does not have, or has in another shape.
    """
    reader = HuggingFaceStorageReader(str(checkpoint.folder))
    stored = reader.read_metadata().state_dict_metadata
    for name, tensor in entries.items():
        size = getattr(stored.get(name), "size", None)
        if size != tensor.shape:
            had = "no such tensor" if size is None else f"shape {list(size)}"
            raise ValueError(
                f"checkpoint {checkpoint.folder}: {name} has shape {list(tensor.shape)} in this "
                f"run and {had} there: the recipe or the classes changed; start another run folder"
            )
    with _single_process_is_meant():
        dcp.load(
            entries,
            storage_reader=HuggingFaceStorageReader(str(checkpoint.folder)),
            no_dist=world.size == 1,
        )


def restore_random_state(checkpoint: Checkpoint, world: World, *, seed: int) -> None:
    """This rank's random state; at another world size, one made from (seed, step, rank)."""
    states = checkpoint.state["random_states"]
    if checkpoint.state["world_size"] == world.size:
        packed = base64.b64decode(states[world.rank])
        state = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        cpu_bytes = torch.get_rng_state().numel()
        torch.set_rng_state(state[:cpu_bytes])
        if world.device.type == "cuda":
            torch.cuda.set_rng_state(state[cpu_bytes:], world.device)
    else:
        mixed = hashlib.sha256(f"{seed}/{checkpoint.step}/{world.rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(mixed[:8], "big") >> 1)


def _gather_random_states(world: World) -> list[str]:
    state = torch.get_rng_state()
    if world.device.type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state(world.device)])
    gathered = all_gather_equal(state.to(world.device), world.group)
    return [base64.b64encode(part.cpu().numpy().tobytes()).decode() for part in gathered]


def _commit(aside: Path, folder: Path) -> None:
    files = {path.name: _fingerprint(path) for path in sorted(aside.iterdir())}
    manifest = {"format_version": FORMAT_VERSION, "files": files}
    (aside / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*aside.iterdir(), aside):
        _sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def committed_folders(root: Path) -> list[Path]:
    """The folders of committed checkpoints under `root`, oldest first."""
    return sorted(path for path in root.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"checkpoint {path.parent}: {path.name} is missing") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"checkpoint {path.parent}: {path.name} is unreadable: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"checkpoint {path.parent}: {path.name} is not an object")
    return content


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or")
        yield
