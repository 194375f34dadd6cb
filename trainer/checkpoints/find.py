"""Finds and opens checkpoints. Every file is verified before the contents are used."""

import hashlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.retry import is_transient, retried
from trainer.checkpoints.exchange import disk_failure, exchange
from trainer.checkpoints.folders import candidate_folders, committed_folders, mode_of, step_of
from trainer.checkpoints.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    FileDigest,
    Manifest,
    read_manifest,
)
from trainer.world import World

_HASHING_THREADS = 8


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: its folder and its state, which contains everything except
    tensors.
    """

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        step: int = self.state["step"]
        return step


def find_checkpoint(root: Path, world: World) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint under `root` and the reasons why newer ones were rejected.
    The result is the same on every rank (collective).

    Only rank 0 verifies the files against the manifest. Raises OSError on every rank if `root`
    cannot be read, and RetriesExhaustedError if a transient error persists: the newest checkpoint
    may be valid, and resuming from an older one would lose steps.
    """
    found, result = _find(root) if world.is_main else (None, {})
    result = exchange(result, world.group)[0]
    if result["error"] is not None:
        raise disk_failure(result["error"], transient=result["transient"])
    if result["name"] is not None and not world.is_main:
        folder = root / result["name"]
        state = retried(str(folder), lambda: _read_state(folder, read_manifest(folder)))
        found = Checkpoint(folder, state)
    return found, result["rejected"]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint and verify every file.

    Raises FileNotFoundError, listing the existing steps, if the folder does not exist; ValueError,
    naming the folder and the file, if a file is missing, added or altered; and
    RetriesExhaustedError if a transient error persists.
    """
    what = f"checkpoint {folder}"
    if retried(what, lambda: mode_of(folder)) is None:
        raise FileNotFoundError(_missing(folder))
    try:
        return retried(what, lambda: _verified(folder))
    except OSError as error:
        if is_transient(error):
            raise
        raise ValueError(
            f"checkpoint {folder} is unreadable: {error}; fix the error or delete the folder"
        ) from None


def _verified(folder: Path) -> Checkpoint:
    manifest = inspect_checkpoint(folder)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        digests = pool.map(_digest_of, (folder / name for name in manifest.files))
        for (name, expected), digest in zip(manifest.files.items(), digests, strict=True):
            if digest != expected.sha256:
                raise _altered(folder, name, "SHA-256 differs")
    return Checkpoint(folder, _read_state(folder, manifest))


def _missing(folder: Path) -> str:
    steps = ", ".join(str(step_of(path)) for path in committed_folders(folder.parent))
    existing = f"choose one of the steps {steps}" if steps else "it has none yet, so train it first"
    return f"run {folder.parent.parent} has no checkpoint of step {step_of(folder)}: {existing}"


def inspect_checkpoint(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint after checking the names and sizes of its files. Contents
    are not read.

    Raises ValueError if a name or size differs.
    """
    if not stat.S_ISDIR(mode_of(folder) or 0):
        raise ValueError(f"checkpoint {folder} is not a folder: move or delete it")
    manifest = read_manifest(folder)
    if manifest.step != step_of(folder):
        raise ValueError(
            f"checkpoint {folder} contains step {manifest.step}, but is named for another step: "
            "rename or delete the folder"
        )
    present = {path.name for path in folder.iterdir()} - {MANIFEST_FILE}
    for name in sorted(manifest.files.keys() ^ present):
        what = "is missing" if name in manifest.files else "is not in the manifest"
        raise ValueError(f"checkpoint {folder}: {name} {what}; delete the folder")
    for name, expected in manifest.files.items():
        _check_kind_and_size(folder, name, expected)
    if STATE_FILE not in manifest.files:
        raise ValueError(f"checkpoint {folder}: {STATE_FILE} is missing; delete the folder")
    return manifest


def _find(root: Path) -> tuple[Checkpoint | None, dict[str, Any]]:
    rejected: list[str] = []
    result = {"name": None, "rejected": rejected, "error": None}
    try:
        for folder in reversed(candidate_folders(root)):
            try:
                found = open_checkpoint(folder)
            except ValueError as error:
                rejected.append(str(error))
            else:
                return found, {**result, "name": folder.name}
    except OSError as error:
        transient = is_transient(error)
        fix = ", or delete that checkpoint to resume from an older one" if transient else ""
        line = f"the checkpoints in {root} are unreadable: {error}{fix}"
        return None, {**result, "error": line, "transient": transient}
    return None, result


def _check_kind_and_size(folder: Path, name: str, expected: FileDigest) -> None:
    # A link could point outside the folder, and opening a pipe would block forever.
    status = (folder / name).lstat()
    if not stat.S_ISREG(status.st_mode):
        raise _altered(folder, name, "not a regular file")
    if status.st_size != expected.bytes:
        raise _altered(folder, name, f"{status.st_size} bytes instead of {expected.bytes}")


def _read_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    raw = (folder / STATE_FILE).read_bytes()
    if hashlib.sha256(raw).hexdigest() != manifest.files[STATE_FILE].sha256:
        raise _altered(folder, STATE_FILE, "SHA-256 differs")
    try:
        state = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint {folder}: {STATE_FILE} is unreadable: {error}") from None
    if not isinstance(state, dict) or state.get("step") != manifest.step:
        raise ValueError(f"checkpoint {folder}: {STATE_FILE} does not contain step {manifest.step}")
    return state


def _digest_of(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _altered(folder: Path, name: str, how: str) -> ValueError:
    return ValueError(
        f"checkpoint {folder}: {name} was altered after it was written ({how}); delete the folder"
    )
