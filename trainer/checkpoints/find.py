"""Finds and opens checkpoints. Every file is verified before the contents are used."""

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import Store

from data.retry import is_transient, retried
from trainer.checkpoints.exchange import agreed, described, disk_failure, raise_described
from trainer.checkpoints.folders import candidate_folders, committed_folders, mode_of, step_of
from trainer.checkpoints.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    Manifest,
    read_manifest,
)
from trainer.world import World

_HASHING_THREADS = 8
_LONGEST_POLL_SECONDS = 0.5
_LARGE_GB = 5  # a verification that takes seconds is announced
# The keys of a verification in its store: the number of ranks that are done, and the first failure.
_RANKS, _FAILURE = "ranks", "failure"


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

    Raises OSError on every rank if `root` cannot be read, and RetriesExhaustedError if a transient
    error persists: the newest checkpoint may be valid, and resuming from an older one would lose
    steps.
    """
    rejected: list[str] = []
    try:
        names = _on_main(lambda: [path.name for path in candidate_folders(root)], world)
        for name in reversed(names):
            try:
                return open_checkpoint(root / name, world), rejected
            except ValueError as error:
                rejected.append(str(error))
    except OSError as error:
        transient = is_transient(error)
        fix = ", or delete that checkpoint to resume from an older one" if transient else ""
        line = f"the checkpoints in {root} are unreadable: {error}{fix}"
        raise disk_failure(line, transient=transient) from None
    return None, rejected


def open_checkpoint(folder: Path, world: World) -> Checkpoint:
    """Open a checkpoint and verify every file. The result is the same on every rank (collective).

    Rank 0 checks the names and sizes. The contents are divided among the ranks, so that each file
    is hashed once.

    Raises on every rank: FileNotFoundError, listing the existing steps, if the folder does not
    exist; ValueError, naming the folder and the file, if a file is missing, added, altered or
    unreadable; RetriesExhaustedError if a transient error persists; and OSError if another rank
    does not see a file that rank 0 sees.
    """
    manifest = Manifest(**_on_main(lambda: _inspected(folder).model_dump(), world))
    names = sorted(manifest.files.keys() - {STATE_FILE})
    size = sum(file.bytes for file in manifest.files.values()) / 1e9
    if world.is_main and size > _LARGE_GB:
        print(f"verifying {folder}: {len(names)} files, {size:.1f} GB", flush=True)
    store = world.new_store()
    # With the same number of ranks, a rank hashes the file that it wrote and is about to load.
    state = _verify_share(folder, manifest, names[world.rank :: world.size], world, store)
    # The ranks wait for each other through a store and without a time limit, because hashing may
    # take longer than the timeout of a collective. If a rank dies, the launcher ends the others.
    poll_seconds = 0.001
    while store.add(_RANKS, 0) < world.size:
        time.sleep(poll_seconds)
        poll_seconds = min(2 * poll_seconds, _LONGEST_POLL_SECONDS)
    failure = json.loads(store.get(_FAILURE)) if store.check([_FAILURE]) else None
    # After a failure, ranks exit. One of them may host the store, which the others still read.
    world.barrier()
    if failure is not None:
        raise_described(failure)
    return Checkpoint(folder, state)


def _verify_share(
    folder: Path, manifest: Manifest, names: list[str], world: World, store: Store
) -> dict[str, Any]:
    """Verify the files `names`, and return the state, which every rank reads. Errors are stored."""
    state: dict[str, Any] = {}
    pool = ThreadPoolExecutor(_HASHING_THREADS)
    try:
        state = retried(str(folder), lambda: _read_state(folder, manifest))
        digests = pool.map(lambda name: _digest_of(folder / name), names)
        for name, digest in zip(names, digests, strict=True):
            if digest != manifest.files[name].sha256:
                raise _altered(folder, name, "SHA-256 differs")
    except (ValueError, OSError) as error:
        failure: Exception = error
        if isinstance(error, FileNotFoundError | PermissionError) and not world.is_main:
            # The folder is not mounted on this machine, so the checkpoint may be valid.
            seen = f"rank 0 can open it, but rank {world.rank} cannot: mount it on all machines"
            failure = OSError(f"{error}; {seen}")
        elif isinstance(error, OSError) and not is_transient(error):
            failure = _unreadable(folder, error)
        store.compare_set(_FAILURE, "", json.dumps(described(failure)))
    finally:  # after an error or Ctrl-C, do not wait for the remaining files
        pool.shutdown(wait=False, cancel_futures=True)
    store.add(_RANKS, 1)
    return state


def _inspected(folder: Path) -> Manifest:
    """Return the manifest after checking that this rank can open all files of it."""

    def inspect() -> Manifest:
        manifest = inspect_checkpoint(folder)
        for name in manifest.files:
            (folder / name).open("rb").close()
        return manifest

    what = f"checkpoint {folder}"
    if retried(what, lambda: mode_of(folder)) is None:
        steps = ", ".join(str(step_of(path)) for path in committed_folders(folder.parent))
        fix = f"choose one of the steps {steps}" if steps else "it has none yet, so train it first"
        raise FileNotFoundError(
            f"run {folder.parent.parent} has no checkpoint of step {step_of(folder)}: {fix}"
        )
    try:
        return retried(what, inspect)
    except OSError as error:
        if is_transient(error):
            raise
        raise _unreadable(folder, error) from None


def _on_main(operation: Callable[[], Any], world: World) -> Any:
    """Return the result of `operation` on rank 0, or raise its error, on every rank
    (collective)."""
    return agreed(lambda: operation() if world.is_main else None, world.group)[0]


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
        # A link could point outside the folder, and opening a pipe would block forever.
        status = (folder / name).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise _altered(folder, name, "not a regular file")
        if status.st_size != expected.bytes:
            raise _altered(folder, name, f"{status.st_size} bytes instead of {expected.bytes}")
    if STATE_FILE not in manifest.files:
        raise ValueError(f"checkpoint {folder}: {STATE_FILE} is missing; delete the folder")
    return manifest


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
    def read() -> str:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return retried(str(path), read)


def _unreadable(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"checkpoint {folder} is unreadable: {error}; fix the error or delete the folder"
    )


def _altered(folder: Path, name: str, how: str) -> ValueError:
    return ValueError(
        f"checkpoint {folder}: {name} was altered after it was written ({how}); delete the folder"
    )
