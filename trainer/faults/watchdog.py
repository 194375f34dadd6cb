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

import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Self

from trainer.faults.flight_recorder import Collective, FlightRecorder
from trainer.faults.hang_report import RankState, describe_hang, describe_lost_store
from trainer.faults.rank_store import RankStore, host_of_store
from trainer.process.exit_codes import FAILED
from trainer.telemetry.phases import Phases
from trainer.world import World, is_lost_rank, leave

# Time between the two reads of all states. A live rank writes its state several times in between.
_GAP_SECONDS = 4.0
_POLLS_PER_GAP = 8
_LIBRARIES = ("torch", "deepspeed", "contextlib")

_States = dict[int, RankState]


class LostRankError(RuntimeError):
    """Training cannot continue because another rank is lost. The message names the rank.

    If `is_reported` is true, another rank has printed the reason, so this message need not be
    printed.
    """

    def __init__(self, line: str | None) -> None:
        self.is_reported = line is None
        super().__init__(line or "another rank has reported the reason")


class Watchdog:
    """Runs a thread that ends this rank's process after `timeout_seconds` in one collective.

    Entering the context and leaving it without an error are both collective. An error about a lost
    rank is converted to LostRankError. With one rank, the watchdog does nothing. The timeouts of
    the process groups must be several seconds longer than `timeout_seconds`. Raises RuntimeError if
    torch's flight recorder is disabled.
    """

    def __init__(self, world: World, *, timeout_seconds: float, phases: Phases) -> None:
        self._world, self._timeout, self._phases = world, timeout_seconds, phases
        self._gap = min(_GAP_SECONDS, timeout_seconds / 2)
        self._interval = self._gap / _POLLS_PER_GAP
        self._recorder = FlightRecorder()
        self._step = self._beat = 0
        self._pending: Collective | None = None
        self._since = 0.0
        self._failed: Collective | None = None
        self._before: _States | None = None
        self._has_read_states = False
        self._closed = threading.Event()
        # Held while a thread prepares a report. A wait can fail with an error in the main thread
        # while the watchdog thread is investigating it; only one of them may report.
        self._report_lock = threading.Lock()

    def __enter__(self) -> Self:
        if self._world.size == 1:
            return self
        store = self._world.new_store()
        self._recorder.read()
        if self._recorder.newest is None:
            raise RuntimeError(
                "torch's flight recorder, which the watchdog requires, is disabled: set "
                "TORCH_FR_BUFFER_SIZE to 256 or unset it"
            )
        self._store = RankStore(store, rank=self._world.rank, size=self._world.size)
        # Publish now, so that a state exists even if this rank stops immediately afterwards.
        self._store.publish(self._observe().to_json())
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def at(self, step: int) -> None:
        """Record that this rank begins `step`."""
        self._step = step

    def explain(self, error: BaseException) -> str | None:
        """Return the message for an error about another rank, or None if another rank has reported
        it.

        Takes several seconds if the error is a timeout.
        """
        if "Timed out waiting" not in str(error):
            # The launcher reports the rank that exited. This rank only needs to exit promptly.
            return None if self._store.is_over() else "another rank exited during a step"
        with self._report_lock:
            recorder = FlightRecorder()  # of this thread
            recorder.read()
            # The recorder no longer lists a collective as pending once it has raised an error.
            self._failed = recorder.pending or self._pending or recorder.newest
            before = self._states()
            time.sleep(self._gap)
            return self._investigate(before)

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
            line = self.explain(error)
            self._wait_for_readers()
            self._close()
            raise LostRankError(line) from error
        self._close()
        if error is None:
            # The rank that hosts the store must not exit while another rank is still writing to it.
            self._world.barrier()

    def _close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=self._gap)
        self._store.close()

    def _watch(self) -> None:
        while not self._closed.wait(self._interval):
            state = self._observe()
            self._store.publish(state.to_json())
            if self._failed is not None:
                continue
            if self._store.over:
                self._end(None)
            if state.waited_seconds < self._timeout - self._gap:
                self._has_read_states = False
            elif not self._has_read_states:
                self._before, self._has_read_states = self._states(), True
            elif state.waited_seconds >= self._timeout:
                with self._report_lock:
                    if self._failed is None:
                        self._end(self._investigate(self._before))

    def _observe(self) -> RankState:
        recorder, now = self._recorder, time.monotonic()
        newest = pending = self._failed
        if self._failed is None:
            recorder.poll()
            newest, pending = recorder.newest, recorder.pending
        if pending != self._pending:
            # The collective was issued before this poll saw it. The wall clock may have been
            # adjusted, so trust it only up to a few poll intervals.
            late = min(max(recorder.pending_seconds, 0.0), 3 * self._interval)
            self._pending, self._since = pending, now - late
        self._beat += 1
        return RankState(
            beat=self._beat,
            step=self._step,
            phase=self._phases.current or "",
            location=_main_thread_location(),
            newest=newest,
            pending=pending,
            waited_seconds=now - self._since if pending else 0.0,
        )

    def _states(self) -> _States | None:
        texts = self._store.read()
        if texts is None:
            return None
        return {rank: RankState.from_json(text) for rank, text in texts.items()}

    def _investigate(self, before: _States | None) -> str | None:
        """Return the message, or None if another rank reports the hang."""
        after = self._states()
        if before is None or after is None:
            rank, host = self._world.rank, host_of_store()
            return describe_lost_store(self._observe(), rank=rank, host=host)
        is_first = self._store.claim()
        return None if is_first is False else describe_hang(before, after, size=self._world.size)

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
    `module:line`.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None and _is_library(frame):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_globals.get('__name__', '?')}:{frame.f_lineno}"


def _is_library(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in _LIBRARIES or module.startswith(__package__)
