"""Terminates a rank that hangs in a collective, and reports the collective and which ranks hang.

Only time inside a collective counts: reading data, compiling, evaluating and writing may take any
amount of time. The timeouts of the process groups are not sufficient: a gloo timeout error does not
name a rank, and an NCCL timeout ends the process without a message.

A thread in every rank publishes the rank's state (step, phase, line of code, pending collective)
several times per second. When a collective has waited for almost `timeout_seconds`, the thread
reads the states of all ranks. At the timeout it reads them again: a rank whose beat has not
increased in between is dead or unreachable. The first rank to claim the report prints it; the other
ranks exit silently.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from trainer.faults.hang_report import FlightRecorder, RankState, describe_hang
from trainer.process.exit_codes import FAILED
from trainer.telemetry.phases import Phases
from trainer.world import World, is_lost_rank, leave

# Time between the two reads of all states. A live rank writes its state several times in between.
_GAP_SECONDS = 4.0
_POLLS_PER_GAP = 8
_STORE_SECONDS = 2.0
_OVER = "over"
LOST = "another rank exited during a step"
_LIBRARIES = ("torch", "deepspeed", "contextlib")

_States = dict[int, RankState]


class _SharedStates:
    """The states of all ranks in the process group's store.

    A call to a store whose host is suspended never returns, regardless of the timeout. A separate
    thread therefore makes all calls, and callers wait for the result with their own timeout. If the
    thread is stuck, the process must exit with `trainer.world.leave`. `over` becomes true at the
    first `publish` after any rank has claimed the report.
    """

    def __init__(self, world: World) -> None:
        self.over = False
        self._world, self._store = world, world.new_store()
        self._store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="watchdog store")
        self._writing: Future[None] | None = None

    def publish(self, state: RankState) -> None:
        """Write the state that the other ranks read, unless the last one is still being written or
        failed. Never blocks."""
        last = self._writing
        if last is None or (last.done() and last.exception() is None):
            self._writing = self._thread.submit(self._write, json.dumps(asdict(state)))

    def _write(self, text: str) -> None:
        # Stop writing once the run is over, because the store may be closed at any time and torch
        # would then print errors.
        if not self.over:
            self._store.set(str(self._world.rank), text)
            self.over = self._store.check([_OVER])

    def read(self) -> _States | None:
        """Return the states of all ranks that have written one, or None if the store does not
        respond."""
        texts = self._call(
            lambda: {
                rank: self._store.get(str(rank)).decode()
                for rank in range(self._world.size)
                if self._store.check([str(rank)])
            }
        )
        return texts and {rank: RankState(**json.loads(text)) for rank, text in texts.items()}

    def claim(self) -> bool:
        """Claim the report. Returns false if another rank has claimed it."""
        self.over = True
        return self._call(lambda: self._store.add(_OVER, 1) == 1) is not False

    def is_claimed(self) -> bool:
        return self.over or bool(self._call(lambda: self._store.check([_OVER])))

    def close(self) -> None:
        """Close the connection. Call this before the process group is destroyed."""
        self._call(lambda: None)
        self._thread.shutdown(wait=False, cancel_futures=True)
        del self._store

    def _call(self, operation: Callable[[], Any]) -> Any:
        try:
            return self._thread.submit(operation).result(_STORE_SECONDS)
        except (TimeoutError, dist.DistError):  # the host is suspended or has exited
            return None


class Watchdog:
    """Runs a thread that ends this rank's process after `timeout_seconds` in one collective.

    Entering the context and leaving it without an error are both collective. An error about a lost
    rank becomes a RuntimeError, or ends the process if another rank has printed the reason. With
    one rank, the watchdog does nothing. The timeouts of the process groups must be several seconds
    longer than `timeout_seconds`. Raises RuntimeError if torch's flight recorder is disabled.
    """

    def __init__(self, world: World, *, timeout_seconds: float, phases: Phases) -> None:
        self._world, self._timeout, self._phases = world, timeout_seconds, phases
        self._gap = min(_GAP_SECONDS, timeout_seconds / 2)
        self._interval = self._gap / _POLLS_PER_GAP
        self._recorder = FlightRecorder()
        self._step = self._beat = 0
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        if self._world.size == 1:
            return self
        self._states = _SharedStates(self._world)
        self._recorder.read()
        if not self._recorder.name:
            raise RuntimeError(
                "torch's flight recorder, which the watchdog requires, is disabled: set "
                "TORCH_FR_BUFFER_SIZE to 256 or unset it"
            )
        # Publish now, so that a state exists even if this rank stops immediately afterwards.
        self._states.publish(self._observe())
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def at(self, step: int) -> None:
        """Record that this rank begins `step`."""
        self._step = step

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._world.size == 1:
            return
        if error is None:
            # Keep watching until all ranks have finished: one may have skipped a collective.
            try:
                self._world.barrier()
            except RuntimeError as lost:
                if not is_lost_rank(lost):
                    raise
                error = lost
        if error is not None and is_lost_rank(error):
            # The launcher reports the rank that exited. This rank only needs to exit promptly.
            is_reported = self._states.is_claimed()
            self._wait_for_readers()
            self._close()
            if is_reported:
                leave(FAILED)
            raise RuntimeError(LOST) from error
        self._close()
        if error is None:
            # The rank that hosts the store must not exit while another rank is still writing to it.
            self._world.barrier()

    def _close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=self._gap)
        self._states.close()

    def _watch(self) -> None:
        before: _States | None = None
        has_read = False
        while not self._closed.wait(self._interval):
            state = self._observe()
            self._states.publish(state)
            if self._states.over:
                self._end(None)
            waited = state.waited_seconds or 0.0
            if waited < self._timeout - self._gap:
                has_read = False
            elif not has_read:
                before, has_read = self._states.read(), True
            elif waited >= self._timeout:
                self._end(self._investigate(before, state))

    def _observe(self) -> RankState:
        self._recorder.poll()
        self._beat += 1
        return RankState(
            beat=self._beat,
            step=self._step,
            phase=self._phases.current or "",
            location=_main_thread_location(),
            collective=self._recorder.name,
            waited_seconds=self._recorder.waited_seconds,
        )

    def _investigate(self, before: _States | None, own: RankState) -> str | None:
        """Return the message, or None if another rank reports the hang."""
        after = self._states.read()
        if before is None or after is None:
            # This is the same rule as in torch: either the launcher or rank 0 hosts the store.
            by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            host = os.environ.get("MASTER_ADDR", "this machine")
            return (
                f"{'the launcher' if by_launcher else 'rank 0'} on {host}, which hosts the store "
                "of the process group, is not responding (stopped, exited or unreachable); rank "
                f"{self._world.rank}: {own} for {own.waited_seconds:.0f} s: check that machine and "
                "its network"
            )
        if not self._states.claim():
            return None
        return describe_hang(before, after, size=self._world.size)

    def _end(self, line: str | None) -> None:
        if line is not None:
            expired = f"train.timeout_seconds ({self._timeout:g}) exceeded"
            print(f"error: rank {self._world.rank}: {expired}: {line}", file=sys.stderr, flush=True)
        self._wait_for_readers()
        leave(FAILED)

    def _wait_for_readers(self) -> None:
        """Give the other ranks time to read that the hang has been reported. Rank 0 waits longest
        because it may host the store.

        When a rank exits, its connections break, and the other ranks may be waiting on them.
        """
        time.sleep((2 if self._world.rank else 4) * self._interval)


def _main_thread_location() -> str:
    """Return the innermost line of the main thread outside the libraries and this package, as
    `module:line`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        module = frame.f_globals.get("__name__", "?")
        is_library = module.partition(".")[0] in _LIBRARIES or module.startswith(__package__)
        if not is_library or frame.f_back is None:
            return f"{module}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
