"""Saves checkpoints, by default in a background thread.

The pieces that a rank writes are first copied to host memory, so training can change the weights
while the thread writes the copies.
"""

import json
import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoints.commit import RESERVED_KEYS, Commit, Save
from trainer.checkpoints.load import packed_random_state
from trainer.checkpoints.manifest import SEPARATOR, Best
from trainer.checkpoints.pieces import Ownership, Piece, bytes_of
from trainer.config import CheckpointConfig
from trainer.telemetry.jsonl import Event
from trainer.world import World

_ALIGNMENT = 64
_GRACE_SECONDS = 15


class Staging:
    """A host buffer for all pieces that this rank writes. Every save reuses it.

    It is pinned if the pieces are on CUDA. torch rounds pinned memory up to a power of two.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copy the pieces into the buffer and return pieces that are views of it. Overwrites the
        copies of the previous save, which must already be on disk.
        """
        is_on_cuda = any(piece.tensor.is_cuda for piece in pieces)
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + -(-piece.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
        if len(self._buffer) != ends[-1]:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._buffer = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=is_on_cuda)
        copies = []
        for piece, begin in zip(pieces, ends, strict=False):
            source = piece.tensor
            part = self._buffer[begin : begin + source.nbytes]
            copy = part.view(source.dtype).view(source.shape)
            if source.is_cuda or not source.is_contiguous():
                copy.copy_(source, non_blocking=source.is_cuda)
            else:
                # numpy copies in one thread. torch would use all cores and wait for those that are
                # busy with data loader workers; on a loaded machine, this was 20 times slower.
                np.copyto(bytes_of(copy), bytes_of(source))
            copies.append(replace(piece, tensor=copy))
        if is_on_cuda:
            torch.cuda.current_stream().synchronize()
        return copies


class CheckpointWriter:
    """Writes checkpoints to `root/step-…`. Creating, using and closing a writer are collective.

    Saving in the background requires host memory for one copy of the pieces that this rank writes
    (its shards and its part of the replicated tensors). Later saves reuse this memory. Saving in
    the foreground copies one tensor at a time if the tensors are on a device; otherwise it copies
    nothing. At most one save is in progress; the next save waits for it.

    If a background save fails, `finish` raises OSError on all ranks. If `save` is called instead,
    it writes in the foreground and raises OSError only if that fails too. `events` reports a
    failure earlier, without a collective.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        world: World,
        *,
        start_step: int,
        keep_every_steps: int | None = None,
        evaluated_on: str | None = None,
        timeout_seconds: float = 600,
    ) -> None:
        """`start_step` is the step from which the run resumes. Folders of later steps were rejected
        on resume; they are neither counted nor deleted. `evaluated_on` identifies the data and the
        settings of the evaluations. Results are compared only if it is the same, or if it was not
        stored because the checkpoint is from an earlier version.
        """
        self._world = world
        self._measure = config.keep_best.measure if config.keep_best else None
        if self._measure is not None and evaluated_on is not None:
            self._measure += SEPARATOR + evaluated_on
        # The thread has its own process group. Otherwise its collectives would interleave with
        # training's collectives in a different order on each rank.
        group = None
        if world.size > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._commit = Commit(root, world, group, config, keep_every_steps, self._measure)
        self._commit.start(start_step)
        self._ownership = Ownership(group, world.rank)
        self._staging = Staging() if config.in_background else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if config.in_background else None
        self._pending: Future[None] | None = None
        self._events: deque[Event] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
            elif self._pending is not None:
                # Wait with a timeout: if other ranks have exited, the save never completes.
                wait([self._pending], _GRACE_SECONDS)
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=False)

    def save(
        self, entries: dict[str, Tensor], state: dict[str, Any], *, best: float | None = None
    ) -> None:
        """Save all entries and `state`, a JSON object with the key `step` (collective).

        `best` is the result of the evaluation at this step, if there was one; a non-finite value is
        ignored. The current random state of each rank is saved too. When saving in the background,
        entries may be changed as soon as this returns.

        If the previous save failed, this one is written in the foreground. Raises OSError on all
        ranks if a save in the foreground fails.
        """
        assert not RESERVED_KEYS & state.keys(), f"{sorted(RESERVED_KEYS)} are reserved"
        failed = False
        try:
            self.finish()
        except OSError:  # raised on all ranks, and already in `events`
            failed = True
        result = None
        if self._measure is not None and best is not None and math.isfinite(best):
            result = Best(measure=self._measure, value=best)
        save = Save(
            step=int(state["step"]),
            state=json.dumps(state, allow_nan=False),
            best=result,
            random_state=packed_random_state(self._world),
            pieces=self._ownership.choose(entries),
        )
        if self._thread is None or failed:
            self._write(save)
            return
        assert self._staging is not None
        save.pieces = self._staging.copy(save.pieces)
        self._pending = self._thread.submit(self._write, save)

    def events(self) -> list[Event]:
        """Return what happened since the last call. Not collective.

        `checkpoint`: a folder was committed. `lost_checkpoint`: it could not be written.
        `kept_checkpoints`: it was, but older checkpoints could not be deleted.
        """
        return [self._events.popleft() for _ in range(len(self._events))]

    def finish(self) -> None:
        """Wait until the pending save is committed. Raises OSError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, save: Save) -> None:
        try:
            folder = self._commit.write(save)
        except OSError as error:
            self._failed("lost_checkpoint", save.step, error)
            raise
        self._events.append(
            Event("checkpoint", save.step, f"checkpoint {folder}", {"folder": str(folder)})
        )
        try:
            self._commit.retire(save.step)
        except OSError as error:  # not fatal: the checkpoint is committed; the next save retries
            self._failed("kept_checkpoints", save.step, error)

    def _failed(self, name: str, step: int, error: OSError) -> None:
        self._events.append(Event(name, step, str(error), {"reason": str(error)}))
