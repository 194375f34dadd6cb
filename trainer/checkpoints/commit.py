"""One save, from the pieces in memory to a committed folder.

All ranks write their pieces. Rank 0 commits the checkpoint and deletes those that the retention
policy does not keep.

A save goes through these stages. Each ends with an exchange between the ranks, so a stage starts
only after all ranks have completed the one before:

1. make:    rank 0 creates `step-….partial`
2. write:   every rank writes its tensors into it and syncs them to disk
3. seal:    rank 0 adds `state.json` and then the manifest with the digests of all files
4. publish: rank 0 renames the folder to `step-…`

If the run is killed at any point, the folder either has its final name and a complete manifest, or
still ends in `.partial` and is deleted at the next start.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch.distributed import ProcessGroup

from data.retry import is_transient, retried
from trainer.checkpoints.exchange import disk_failure, exchange, explain_disk_error
from trainer.checkpoints.find import inspect_checkpoint
from trainer.checkpoints.folders import (
    PARTIAL,
    REPLACED,
    candidate_folders,
    committed_folders,
    discard,
    publish,
    remove_leftovers,
    settle_replaced,
    step_folder,
    step_of,
)
from trainer.checkpoints.manifest import MANIFEST_FILE, STATE_FILE, Best, FileDigest, Manifest
from trainer.checkpoints.pieces import Piece
from trainer.checkpoints.shard_file import write_file, write_shard
from trainer.world import World

# Keys that the writer adds to state.json.
WRITERS_KEYS = frozenset({"world_size", "random_states", "best"})


@dataclass(frozen=True)
class Stored:
    """The step of a committed checkpoint and, if there was an evaluation, its result."""

    step: int
    best: float | None = None


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep: the newest `last`, those at multiples of `every_steps`, and the
    best by `mode` (max or min)."""

    last: int
    every_steps: int | None = None
    mode: Literal["max", "min"] | None = None


def superseded(stored: Sequence[Stored], retention: Retention) -> set[int]:
    """Steps that may be deleted; never the newest. Among equal results the earliest is the best."""
    kept = set(sorted(one.step for one in stored)[-retention.last :])
    if retention.every_steps is not None:
        kept |= {one.step for one in stored if one.step % retention.every_steps == 0}
    if retention.mode is not None:
        kept |= _best(stored, sign=1 if retention.mode == "max" else -1)
    return {one.step for one in stored} - kept


def _best(stored: Sequence[Stored], *, sign: int) -> set[int]:
    measured = [
        (sign * one.best, -one.step)
        for one in stored
        if one.best is not None and math.isfinite(one.best)
    ]
    return {-max(measured)[1]} if measured else set()


@dataclass
class Save:
    """One rank's part of a save. `state` is the trainer's state as JSON."""

    step: int
    state: str
    best: Best | None
    random_state: str
    pieces: list[Piece]


@dataclass(frozen=True)
class Commit:
    """Commits saves under `root`. Steps in `refused` are neither counted nor deleted.

    Every stage ends with an exchange of errors, so either all ranks raise or none does. A rank
    retries its stage after a transient error, so every stage must work again after a partial
    failure.
    """

    root: Path
    world: World
    group: ProcessGroup | None
    retention: Retention
    measure: str | None
    refused: set[int] = field(default_factory=set)

    def start(self, step: int) -> None:
        """Delete unfinished folders of a killed run and record committed folders after `step` as
        refused, because the run does not resume from them (collective). Raises OSError on all
        ranks."""
        what = f"what a run left in {self.root} could not be cleared away"
        self.refused.update(self._together(what, lambda: self._start(step))[0])

    def write(self, save: Save) -> Path:
        """Write and commit a save; returns its folder (collective). Raises OSError on all ranks."""
        folder = step_folder(self.root, save.step)
        temporary = folder.with_name(folder.name + PARTIAL)
        what = f"checkpoint {folder} could not be written"
        try:
            self._on_main(what, lambda: self._make(temporary))
            written = self._together(what, lambda: self._write_mine(temporary, save))
            self._on_main(what, lambda: self._seal(temporary, save, written))
            self._on_main(what, lambda: publish(temporary, folder))
        except OSError:
            if self.world.is_main:
                self._clear()
            raise
        self.refused.discard(save.step)
        return folder

    def retire(self, step: int) -> None:
        """Delete the checkpoints that are not kept now that the one of `step` is committed
        (collective)."""
        what = f"older checkpoints in {self.root} could not be deleted"
        self._on_main(what, lambda: self._retire(step))

    def _on_main(self, what: str, stage: Callable[[], None]) -> None:
        self._together(what, lambda: stage() if self.world.is_main else None)

    def _together(self, what: str, stage: Callable[[], Any]) -> list[Any]:
        """Run `stage` on every rank and return all results in rank order. Raises OSError on all
        ranks if the stage failed on any rank."""
        answer, trouble = None, None
        try:
            answer = retried(what, stage)
        except (OSError, MemoryError) as error:
            may_pass = is_transient(error) or isinstance(error, MemoryError)
            trouble = [explain_disk_error(error, self.root), may_pass]
        answers = exchange([answer, trouble], self.group)
        for rank, (_, met) in enumerate(answers):
            if met is not None:
                line, may_pass = met
                where = f" on rank {rank}" if self.world.size > 1 else ""
                raise disk_failure(f"{what}{where}: {line}", transient=may_pass)
        return [answer for answer, _ in answers]

    def _start(self, step: int) -> list[int]:
        if not self.world.is_main or not self.root.is_dir():
            return []
        remove_leftovers(self.root)
        steps = [step_of(path) or 0 for path in committed_folders(self.root)]
        return [later for later in steps if later > step]

    def _make(self, temporary: Path) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.root)
        temporary.mkdir()

    def _write_mine(self, temporary: Path, save: Save) -> dict[str, Any]:
        mine: dict[str, Any] = {"random_state": save.random_state, "files": {}}
        if save.pieces:
            name = f"tensors-{self.world.rank + 1:05d}-of-{self.world.size:05d}.safetensors"
            mine["files"][name] = write_shard(temporary / name, save.pieces).model_dump()
        return mine

    def _seal(self, temporary: Path, save: Save, written: list[dict[str, Any]]) -> None:
        """Add the state and the manifest to the files of the ranks. The manifest is written last,
        because it makes the folder a complete checkpoint."""
        ours = {
            "world_size": self.world.size,
            "random_states": [rank["random_state"] for rank in written],
            "best": save.best.model_dump() if save.best else None,
        }
        files = {
            name: FileDigest(**digest) for rank in written for name, digest in rank["files"].items()
        }
        text = json.dumps({**json.loads(save.state), **ours}, indent=1).encode()
        files[STATE_FILE] = write_file(temporary / STATE_FILE, [memoryview(text)])
        _check_all_there(temporary, files)
        manifest = Manifest(step=save.step, world_size=self.world.size, best=save.best, files=files)
        write_file(temporary / MANIFEST_FILE, [memoryview(manifest.render())])

    def _clear(self) -> None:
        """Clean up after a failed save. If this fails too, the next save or start cleans up."""
        try:
            remove_leftovers(self.root)
        except OSError:
            return

    def _retire(self, step: int) -> None:
        folders = [path for path in candidate_folders(self.root) if (step_of(path) or 0) <= step]
        for path in folders:
            if path.suffix == REPLACED and step_of(path) not in self.refused:
                settle_replaced(path)
        stored = {
            path: one
            for path in committed_folders(self.root)
            if (one := self._stored(path, step)) is not None
        }
        doomed = superseded(list(stored.values()), self.retention)
        for path, one in stored.items():
            if one.step in doomed:
                discard(path)

    def _stored(self, path: Path, step: int) -> Stored | None:
        """The step and result of a checkpoint. None if it is refused or altered; file contents are
        not read."""
        if (step_of(path) or 0) > step or step_of(path) in self.refused:
            return None
        try:
            manifest = inspect_checkpoint(path)
        except ValueError:
            return None
        # Results of another measure are not comparable.
        same = manifest.best is not None and manifest.best.measure == self.measure
        return Stored(manifest.step, manifest.best.value if manifest.best and same else None)


def _check_all_there(temporary: Path, files: dict[str, FileDigest]) -> None:
    """Check that this rank, which commits, sees all files that the ranks reported, in full size."""
    present = {path.name for path in temporary.iterdir()} - {MANIFEST_FILE}
    if present != files.keys():
        odd = ", ".join(sorted(present ^ files.keys()))
        raise OSError(f"rank 0 does not see the same files as the ranks that wrote them: {odd}")
    for name, digest in files.items():
        with (temporary / name).open("rb") as file:  # opening makes NFS revalidate the size
            size = os.fstat(file.fileno()).st_size
        if size != digest.bytes:
            raise OSError(f"{name} has {size} bytes and {digest.bytes} were written")
