"""Ends a rank that waits for the others in vain, and says which rank and which operation it was.

Only waiting inside a collective counts: reading data, compiling, evaluating and writing may take
as long as they like. gloo's own timeout names no rank, NCCL's ends the process without a word.
"""

import secrets
import sys
import threading
import time
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from trainer.faults.flight_recorder import Collective, FlightRecorder, RecordedCollectives
from trainer.faults.hang_report import (
    RankState,
    describe_hang,
    describe_lost_store,
    main_thread_location,
)
from trainer.faults.rank_store import RankStore
from trainer.process.exit_codes import FAILED
from trainer.telemetry.phases import Phases
from trainer.world import World, is_lost_rank, leave

# Between the two looks at all ranks: one that is alive writes several times in it.
_GAP_SECONDS = 4.0
_LOOKS_A_GAP = 8
_ANSWER_SECONDS = 2.0

_States = dict[int, RankState]


class LostRankError(RuntimeError):
    """Training cannot go on without another rank; the text names it.

    `is_reported`: another rank has reported the reason, so that the text is not printed.
    """

    def __init__(self, line: str | None) -> None:
        self.is_reported = line is None
        super().__init__(line or "another rank has said why this run ends")


class Watchdog:
    """A thread in every rank that ends the process after `timeout_seconds` in one collective.

    Entering and leaving without an error are collective. An error about another rank leaves as
    LostRankError. In a world of one it does nothing. The process groups' own timeouts must be
    longer by some seconds, and torch's flight recorder on (RuntimeError otherwise).
    """

    def __init__(self, world: World, *, timeout_seconds: float, phases: Phases) -> None:
        self._world, self._timeout, self._phases = world, timeout_seconds, phases
        self._gap = min(_GAP_SECONDS, timeout_seconds / 2)
        self._interval = self._gap / _LOOKS_A_GAP
        self._recorder = FlightRecorder()
        self._step = 0
        self._beat = 0
        self._pending: Collective | None = None
        self._since = 0.0
        self._failed: Collective | None = None
        self._before: _States | None = None
        self._has_looked = False
        self._closed = threading.Event()
        # Held by the thread that speaks: a wait can end in an error while it is being looked into.
        self._report_lock = threading.Lock()

    def __enter__(self) -> Self:
        if self._world.size == 1:
            return self
        topic = _new_topic()
        if self._recorder.read().newest is None:
            raise RuntimeError(
                "torch's flight recorder is off, without which no hang can be named: set "
                "TORCH_FR_BUFFER_SIZE to 256 or leave it out"
            )
        self._store = RankStore(
            topic, rank=self._world.rank, size=self._world.size, interval=self._interval
        )
        # At once: a rank that stops soon after has been seen.
        self._store.publish(self._observe().to_json())
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def at(self, step: int) -> None:
        """Say that this rank begins `step`."""
        self._step = step

    def explain(self, error: BaseException) -> str | None:
        """The line for an error about another rank; None where another rank has said it.

        Takes some seconds where the error is that a wait was too long.
        """
        if "Timed out waiting" not in str(error):
            # The launcher names the rank that ended; what counts here is to end soon.
            over = self._store.over or self._store.is_over(limit_seconds=_ANSWER_SECONDS)
            return None if over else "another rank ended in the middle of a step"
        with self._report_lock:
            recorded = self._recorder.read()
            self._failed = recorded.pending or self._pending or recorded.newest
            before = self._states()
            time.sleep(self._gap)
            return self._find_out(before)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._world.size == 1:
            return
        if error is None:
            error = self._wait_for_all()
        if error is not None and is_lost_rank(error):
            line = self.explain(error)
            self._wait_for_readers()
            self._close()
            raise LostRankError(line) from error
        self._close()
        if error is None:
            # The rank that keeps the store must not go while another one still writes to it.
            self._world.barrier()

    def _wait_for_all(self) -> RuntimeError | None:
        """The watch goes on until all ranks are here: one may have skipped a collective."""
        try:
            self._world.barrier()
        except RuntimeError as error:
            if not is_lost_rank(error):
                raise
            return error
        return None

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
                self._has_looked = False
            elif not self._has_looked:
                self._before, self._has_looked = self._states(), True
            elif state.waited_seconds >= self._timeout:
                with self._report_lock:
                    if self._failed is None:
                        self._end(self._find_out(self._before))

    def _observe(self) -> RankState:
        recorded = self._recorded()
        now = time.monotonic()
        if recorded.pending != self._pending:
            # Looks come late; of a clock that can be set no more than that is believed.
            late = min(max(recorded.pending_seconds, 0.0), 3 * self._interval)
            self._pending, self._since = recorded.pending, now - late
        self._beat += 1
        return RankState(
            beat=self._beat,
            step=self._step,
            phase=self._phases.current or "",
            location=main_thread_location(),
            newest=recorded.newest,
            pending=recorded.pending,
            waited_seconds=now - self._since if recorded.pending else 0.0,
        )

    def _recorded(self) -> RecordedCollectives:
        """What the recorder says; a collective that raised no longer stands there as pending."""
        if self._failed is not None:
            return RecordedCollectives(newest=self._failed, pending=self._failed)
        return self._recorder.poll()

    def _states(self) -> _States | None:
        texts = self._store.read(limit_seconds=_ANSWER_SECONDS)
        if texts is None:
            return None
        return {rank: RankState.from_json(text) for rank, text in texts.items()}

    def _find_out(self, before: _States | None) -> str | None:
        """The line, or None where another rank says it."""
        after = self._states()
        if before is None or after is None:
            return describe_lost_store(
                self._observe(), rank=self._world.rank, host=self._store.host
            )
        first = self._store.claim(limit_seconds=_ANSWER_SECONDS)
        return None if first is False else describe_hang(before, after, size=self._world.size)

    def _end(self, line: str | None) -> None:
        if line is not None:
            seconds = f"train.timeout_seconds ({self._timeout:g}) is over"
            print(f"error: rank {self._world.rank}: {seconds}: {line}", file=sys.stderr, flush=True)
        self._wait_for_readers()
        leave(FAILED)

    def _wait_for_readers(self) -> None:
        """Wait until they have read that all is said; rank 0, which may keep the store, longest.

        A rank that ends cuts the others off in the middle of a wait.
        """
        time.sleep((2 if self._world.rank else 4) * self._interval)


def _new_topic() -> str:
    """A name that no earlier run of these ranks has used, the same on all of them (collective)."""
    number = torch.tensor([secrets.randbits(62)])
    dist.broadcast(number, src=0)
    return f"watchdog-{number.item():x}"
