"""One save, from the pieces in memory to a committed folder.

All ranks write their pieces. Rank 0 commits the checkpoint and deletes checkpoints that the
retention policy does not keep.

A save consists of these stages. Each ends with an exchange between the ranks, so a stage starts
only after all ranks have completed the previous one:

1. make:    rank 0 creates `step-….partial`
2. write:   every rank writes its tensors into it and syncs them to disk
3. seal:    rank 0 adds `state.json` and then the manifest with the digests of all files
4. publish: rank 0 renames the folder to `step-…`

Renaming is the only step that makes the checkpoint visible, and a rename is atomic. If the run is
killed at any point, the folder either has its final name and a complete manifest, or still ends in
`.partial` and is deleted at the next start. Everything is synced before the rename: otherwise a
power failure could leave a folder with the final name but with empty or truncated files.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from data.retry import is_transient, retried
from trainer.checkpoints.exchange import agreed, disk_failure, explain_disk_error
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
from trainer.checkpoints.manifest import (
    MANIFEST_FILE,
    SEPARATOR,
    STATE_FILE,
    Best,
    FileDigest,
    Manifest,
)
from trainer.checkpoints.pieces import Piece, write_file, write_shard
from trainer.config import CheckpointConfig
from trainer.world import World

# Keys that the writer adds to state.json.
RESERVED_KEYS = frozenset({"world_size", "random_states", "best"})


def superseded(
    results: Mapping[int, float | None], config: CheckpointConfig, keep_every_steps: int | None
) -> set[int]:
    """Return the steps to delete, given the steps of all checkpoints and their evaluation results.

    The newest `keep_last` checkpoints are kept, all checkpoints at multiples of `keep_every_steps`,
    and the best one. If several checkpoints share the best result, the earliest is kept.
    """
    kept = set(sorted(results)[-config.keep_last :])
    if keep_every_steps is not None:
        kept |= {step for step in results if step % keep_every_steps == 0}
    if config.keep_best is not None:
        sign = -1 if config.keep_best.mode == "min" else 1
        measured = [
            (sign * result, -step)
            for step, result in results.items()
            if result is not None and math.isfinite(result)
        ]
        kept |= {-step for _, step in sorted(measured)[-1:]}
    return results.keys() - kept


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
    """Commits saves under `root`. Steps in `rejected` are neither counted nor deleted.

    Every stage ends with an exchange of errors, so either all ranks raise an error or none does. A
    rank retries its stage after a transient error, so every stage must succeed when repeated after
    a partial failure.
    """

    root: Path
    world: World
    group: ProcessGroup | None
    config: CheckpointConfig
    keep_every_steps: int | None
    measure: str | None
    rejected: set[int] = field(default_factory=set)

    def start(self, step: int) -> None:
        """Delete the unfinished folders of a killed run, and record the checkpoints after `step` as
        rejected, because the run does not resume from them (collective). Raises OSError on all
        ranks.
        """

        def start() -> list[int]:
            if not self.world.is_main or not self.root.is_dir():
                return []
            remove_leftovers(self.root)
            steps = [step_of(path) or 0 for path in committed_folders(self.root)]
            return [later for later in steps if later > step]

        what = f"incomplete checkpoints in {self.root} could not be deleted"
        self.rejected.update(self._together(what, start)[0])

    def write(self, save: Save) -> Path:
        """Write and commit a save. Returns its folder (collective). Raises OSError on all ranks."""
        folder = step_folder(self.root, save.step)
        temporary = folder.with_name(folder.name + PARTIAL)
        what = f"checkpoint {folder} could not be written"

        def make() -> None:
            self.root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.root)
            temporary.mkdir()

        try:
            self._on_main(what, make)
            written = self._together(what, lambda: self._write_pieces(temporary, save))
            self._on_main(what, lambda: self._seal(temporary, save, written))
            self._on_main(what, lambda: publish(temporary, folder))
        except OSError:
            if self.world.is_main:
                with suppress(OSError):  # the next save or start cleans up
                    remove_leftovers(self.root)
            raise
        self.rejected.discard(save.step)
        return folder

    def retire(self, step: int) -> None:
        """Delete the checkpoints that are superseded by the checkpoint of `step`
        (collective)."""

        def retire() -> None:
            for path in candidate_folders(self.root):
                of_path = step_of(path) or 0
                if of_path <= step and path.suffix == REPLACED and of_path not in self.rejected:
                    settle_replaced(path)
            for old in superseded(self._results(step), self.config, self.keep_every_steps):
                discard(step_folder(self.root, old))

        self._on_main(f"older checkpoints in {self.root} could not be deleted", retire)

    def _on_main(self, what: str, stage: Callable[[], None]) -> None:
        self._together(what, lambda: stage() if self.world.is_main else None)

    def _together(self, what: str, stage: Callable[[], Any]) -> list[Any]:
        """Run `stage` on every rank and return all results in rank order. Raises OSError on all
        ranks if the stage fails on any rank.
        """

        def explained() -> Any:
            try:
                return retried(what, stage)
            except (OSError, MemoryError) as error:
                where = f" on rank {self.world.rank}" if self.world.size > 1 else ""
                line = f"{what}{where}: {explain_disk_error(error, self.root)}"
                transient = is_transient(error) or isinstance(error, MemoryError)
                raise disk_failure(line, transient=transient) from error

        return agreed(explained, self.group)

    def _write_pieces(self, temporary: Path, save: Save) -> dict[str, Any]:
        written: dict[str, Any] = {"random_state": save.random_state, "files": {}}
        if save.pieces:
            name = f"tensors-{self.world.rank + 1:05d}-of-{self.world.size:05d}.safetensors"
            written["files"][name] = write_shard(temporary / name, save.pieces).model_dump()
        return written

    def _seal(self, temporary: Path, save: Save, written: list[dict[str, Any]]) -> None:
        """Add the state and the manifest to the files of the ranks. The manifest is written last,
        because it makes the folder a complete checkpoint."""
        added = {
            "world_size": self.world.size,
            "random_states": [rank["random_state"] for rank in written],
            "best": save.best.model_dump() if save.best else None,
        }
        files = {
            name: FileDigest(**digest) for rank in written for name, digest in rank["files"].items()
        }
        text = json.dumps({**json.loads(save.state), **added}, indent=1).encode()
        files[STATE_FILE] = write_file(temporary / STATE_FILE, [memoryview(text)])
        _check_complete(temporary, files)
        manifest = Manifest(step=save.step, world_size=self.world.size, best=save.best, files=files)
        write_file(temporary / MANIFEST_FILE, [memoryview(manifest.render())])

    def _results(self, last: int) -> dict[int, float | None]:
        """Return the evaluation results of the checkpoints up to the step `last` that are neither
        rejected nor altered. File contents are not read.
        """
        results: dict[int, float | None] = {}
        measures = (self.measure, (self.measure or "").partition(SEPARATOR)[0])
        for path in committed_folders(self.root):
            step = step_of(path) or 0
            if step > last or step in self.rejected:
                continue
            with suppress(ValueError):
                best = inspect_checkpoint(path).best
                # Results of different measures or on different data are not comparable.
                results[step] = best.value if best and best.measure in measures else None
        return results


def _check_complete(temporary: Path, files: dict[str, FileDigest]) -> None:
    """Check that rank 0, which commits, sees every file that the ranks reported, in full size."""
    present = {path.name for path in temporary.iterdir()} - {MANIFEST_FILE}
    if present != files.keys():
        different = ", ".join(sorted(present ^ files.keys()))
        raise OSError(
            f"rank 0 does not see the same files that the ranks wrote: {different} differ"
        )
    for name, digest in files.items():
        with (temporary / name).open("rb") as file:  # opening makes NFS revalidate the size
            size = os.fstat(file.fileno()).st_size
        if size != digest.bytes:
            raise OSError(f"{name} has {size} bytes, but {digest.bytes} were written")
