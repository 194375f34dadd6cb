"""A copy of this rank's pieces in host memory, so that training may change them meanwhile."""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer.checkpoints.commit import WRITERS_KEYS, Commit, Retention, Save
from trainer.checkpoints.load import packed_random_state
from trainer.checkpoints.manifest import Best
from trainer.checkpoints.pieces import Ownership, Piece, bytes_of
from trainer.config import CheckpointConfig
from trainer.world import World

_ALIGNMENT = 64
_GRACE_SECONDS = 15
_REPORTED_WAIT_SECONDS = 0.01


class Staging:
    """One buffer as large as what this rank writes, used again by every save.

    Pinned where the pieces are on CUDA; torch rounds pinned memory up to a power of two.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The same pieces over the buffer, which must be free: what it held before is lost."""
        begins = self.reserve(pieces)
        copies = []
        for piece, begin in zip(pieces, begins, strict=True):
            copy = self._view(begin, piece.tensor)
            _copy_tensor(piece.tensor, copy)
            copies.append(replace(piece, tensor=copy))
        if _on_cuda(pieces):
            torch.cuda.current_stream().synchronize()
        return copies

    def reserve(self, pieces: Sequence[Piece]) -> list[int]:
        """Have a buffer for these pieces; where in it each begins, in bytes."""
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + -(-piece.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
        if len(self._buffer) != ends[-1]:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # never two of them
            pinned = _on_cuda(pieces)
            self._buffer = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=pinned)
            self._buffer.fill_(0)  # the kernel hands out pages when they are first written
        return ends[:-1]

    def _view(self, begin: int, like: Tensor) -> Tensor:
        part = self._buffer[begin : begin + like.nbytes]
        return part.view(like.dtype).view(like.shape)


def _on_cuda(pieces: Sequence[Piece]) -> bool:
    return any(piece.tensor.is_cuda for piece in pieces)


def _copy_tensor(source: Tensor, into: Tensor) -> None:
    if source.is_cuda or not source.is_contiguous():
        into.copy_(source, non_blocking=source.is_cuda)
    else:
        # In one thread: torch would take all cores and wait for those that the loader's workers
        # have, which was 20 times slower on a machine that was busy.
        np.copyto(bytes_of(into), bytes_of(source))


@dataclass(frozen=True)
class SaveFailure:
    """A save that could not be written, or older ones that could not be deleted after it."""

    step: int
    reason: str
    is_lost: bool


class CheckpointWriter:
    """Writes `root/step-…` from all ranks; made, used and closed by all of them together.

    Host memory: in the background one copy of what this rank writes (its shards, and its part of
    what is replicated), kept between saves; in the foreground none, but of one tensor at a time
    where they are on a device. At most one save is under way: the next one waits and says so.

    A save that could not be written is an OSError of one line from `finish`, or from the next
    `save` where that fails too, on all ranks alike; `failures` tells of it earlier.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        world: World,
        *,
        start_step: int,
        keep_every_steps: int | None = None,
        timeout_seconds: float = 600,
        print_line: Callable[[str], None] = print,
    ) -> None:
        """`start_step` is the step that the run goes on from: folders of later ones are what the
        resume refused, and are neither counted nor deleted."""
        self._world = world
        self._print_line = print_line
        self._measure = config.keep_best.measure if config.keep_best else None
        mode = config.keep_best.mode if config.keep_best else None
        retention = Retention(config.keep_last, keep_every_steps, mode)
        # The thread's collectives must not come between training's: a group of their own.
        group = _own_group(world, timeout_seconds)
        self._commit = Commit(root, world, group, retention, self._measure)
        self._commit.start(start_step)
        self._ownership = Ownership(group, world.rank)
        self._staging = Staging() if config.in_background else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if config.in_background else None
        self._pending: Future[Path] | None = None
        self._pending_step = 0
        self._committed: deque[Path] = deque()
        self._failures: deque[SaveFailure] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
            elif self._pending is not None:
                # Other ranks may be gone: their part of the save would be waited for in vain.
                wait([self._pending], _GRACE_SECONDS)
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=False)

    def reserve(self, entries: dict[str, Tensor]) -> None:
        """Take the memory for such entries now, so that the first save is no longer than the
        others; not needed otherwise (collective)."""
        if self._staging is not None:
            self.finish()
            self._staging.reserve(self._ownership.choose(entries))

    def save(
        self, entries: dict[str, Tensor], state: dict[str, Any], *, best: float | None = None
    ) -> float:
        """Save every entry and `state`, a JSON object with the key `step`; returns the seconds that
        it waited for the save before (collective).

        `best` is what the evaluation at this step measured, if there was one; a value that is not
        finite counts as none. Each rank's random state is saved as it is now. In the background,
        entries may be changed as soon as this returns.

        Where the one before could not be written, this one is written while training waits. Raises
        OSError where that fails too, or this save in the foreground.
        """
        assert not WRITERS_KEYS & state.keys(), f"{sorted(WRITERS_KEYS)} are the writer's own keys"
        waited, failed = 0.0, False
        try:
            waited = self._wait_for_the_one_before(int(state["step"]))
        except OSError:  # on all ranks alike, and told as a trouble
            failed = True
        save = Save(
            step=int(state["step"]),
            state=json.dumps(state, allow_nan=False),
            best=_best_of(self._measure, best),
            random_state=packed_random_state(self._world),
            pieces=self._ownership.choose(entries),
        )
        if self._thread is None or failed:
            self._write(save)
            return waited
        assert self._staging is not None
        save.pieces = self._staging.copy(save.pieces)
        self._pending_step = save.step
        self._pending = self._thread.submit(self._write, save)
        return waited

    def committed(self) -> list[Path]:
        """The folders committed since this was asked last; asks no other rank."""
        return [self._committed.popleft() for _ in range(len(self._committed))]

    def failures(self) -> list[SaveFailure]:
        """What went wrong since this was asked last; asks no other rank."""
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def finish(self) -> None:
        """Wait until what was saved is committed. Raises OSError where it could not be."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _wait_for_the_one_before(self, step: int) -> float:
        if self._pending is None:
            return 0.0
        was_done, started = self._pending.done(), time.perf_counter()
        self.finish()
        waited = 0.0 if was_done else time.perf_counter() - started
        if waited > _REPORTED_WAIT_SECONDS and self._world.is_main:
            self._print_line(
                f"checkpoint of step {step} waited {waited:.2f} s for that of step "
                f"{self._pending_step}: save less often, or to a faster disk"
            )
        return waited

    def _write(self, save: Save) -> Path:
        try:
            folder = self._commit.write(save)
        except OSError as error:
            self._failures.append(SaveFailure(save.step, str(error), is_lost=True))
            raise
        self._committed.append(folder)
        try:
            self._commit.retire(save.step)
        except OSError as error:  # the checkpoint is there all the same, and the next one tries too
            self._failures.append(SaveFailure(save.step, str(error), is_lost=False))
        return folder


def save_checkpoint(
    root: Path, entries: dict[str, Tensor], state: dict[str, Any], world: World, *, keep: int
) -> Path:
    """Write one checkpoint here and now, and drop all but the newest `keep` (collective)."""
    config = CheckpointConfig(keep_last=keep, in_background=False)
    with CheckpointWriter(root, config, world, start_step=state["step"]) as writer:
        writer.save(entries, state)
        return writer.committed()[0]


def _own_group(world: World, timeout_seconds: float) -> ProcessGroup | None:
    if world.size == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))


def _best_of(measure: str | None, value: float | None) -> Best | None:
    if measure is None or value is None or value != value or abs(value) == float("inf"):
        return None
    return Best(measure=measure, value=value)
