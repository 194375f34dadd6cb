"""torch's elastic agent with an end that keeps what the ranks have: who is waited for, who is
signalled, whose exit code counts, and which failures are worth another try."""

import signal
import sys
import time
from functools import partial

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import WorkerState as State
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from launch.ranks.codes import (
    code_that_counts,
    codes_of_their_own,
    is_mended_by_another_try,
    reason,
)
from launch.ranks.ending import Processes, end, wait_for_end
from launch.ranks.interruptible import interruptible
from launch.ranks.meeting import longest_rendezvous, waiting
from launch.ranks.placement import Placement
from launch.ranks.stop import StopRequest
from trainer.process.exit_codes import INTERRUPTED, KILLED, PREEMPTED

# After a failure there is nothing left to save, only lines to say.
_LAST_WORDS_SECONDS = 10
# Machines that wait to come in are read from a state that torch keeps for a second.
_STALE_SECONDS = 1.5
_POLL_SECONDS = 0.1


class Agent(LocalElasticAgent):
    """Runs the ranks of this machine."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        stop: StopRequest,
        log_folder: str,
        placement: Placement,
    ) -> None:
        logs = DefaultLogsSpecs(log_folder)
        super().__init__(spec, logs_specs=logs, shutdown_timeout=placement.shutdown_seconds)
        self._placement = placement
        self._codes: dict[int, int] = {}
        self._stop = stop
        self._killed = False

    @property
    def code(self) -> int:
        """Of the ranks that ended by themselves, or were asked to end."""
        return code_that_counts(self._codes.values())

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        self._pcontext, self._codes = None, {}  # those of the try before count no longer
        super()._initialize_workers(worker_group)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with waiting(self._placement):
            interruptible(
                partial(super()._rendezvous, worker_group),
                seconds=longest_rendezvous(self._placement),
            )

    def _exit_barrier(self) -> None:
        interruptible(super()._exit_barrier)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._note_codes()
        if PREEMPTED in self._codes.values():
            # They all save; the one that makes it valid ends last.
            wait_for_end(self._processes(), self._shutdown_timeout)
            self._note_codes()
        if any(self._codes.values()):
            # Of one that was killed the others know no more than that it is gone. What rank 0 was
            # about to publish is lost with it: that is two small files' time.
            was_killed = -signal.SIGKILL in self._codes.values()
            seconds = 0 if was_killed else _LAST_WORDS_SECONDS
            end(self._processes(), signal.SIGTERM, seconds, again=True)
        result = super()._monitor_workers(worker_group)
        if result.state is not State.FAILED:
            return result
        if not any(self._codes.values()):
            # A rank ended between our look and torch's, who has ended the others meanwhile.
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            self._codes |= codes_of_their_own(codes)
        return self._judged(result)

    def _judged(self, failed: RunResult) -> RunResult:
        """Decides on another try, and says why a rank ended that could not say so itself."""
        if self.code == PREEMPTED and self._is_a_machine_waiting():
            # Its launcher saw the newcomer first and had all ranks save: no end, but a new world.
            return RunResult(state=State.HEALTHY)
        if not is_mended_by_another_try(self.code):
            self._remaining_restarts = 0
        why, restarts = reason(self._codes), self._worker_group.spec.max_restarts
        if self._remaining_restarts:
            number = restarts - self._remaining_restarts + 1
            _say(f"{why or 'the ranks ended before their time'}; restart {number} of {restarts}")
        elif why:
            _say(f"error: {why}")
        return failed

    def _is_a_machine_waiting(self) -> bool:
        if self._worker_group.group_world_size == self._placement.max_nodes:
            return False
        deadline = time.monotonic() + _STALE_SECONDS
        while not (waiting := self._rdzv_handler.num_nodes_waiting() > 0):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        return waiting

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None
    ) -> None:
        """Ask the ranks to save and end, wait, kill what is left; Ctrl-C cuts the wait short."""
        seconds = self._shutdown_timeout if timeout is None else timeout
        # The ranks and not their groups: loader processes have to serve them until the end.
        number = signal.SIGTERM if death_sig == signal.SIGINT else death_sig
        self._killed |= end(self._processes(), number, seconds, stop=self._stop)
        super()._shutdown(death_sig, seconds)

    def code_after(self, number: signal.Signals) -> int:
        """The run's exit code after this signal to the launcher stopped it."""
        self._note_codes()
        stopped = INTERRUPTED if number == signal.SIGINT else PREEMPTED
        if self._stop.in_a_hurry or not self._codes:  # there were no ranks yet
            return stopped
        if self._killed:
            _say(
                f"error: not all ranks ended within {self._shutdown_timeout} s of {number.name} "
                "and they were killed: what followed the last checkpoint is lost; give more "
                "--shutdown-timeout"
            )
            return KILLED + signal.SIGKILL
        if why := reason(self._codes):
            _say(f"error: {why}")
        return stopped if self.code == PREEMPTED else self.code

    def _processes(self) -> Processes:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handler.proc for handler in handlers.values()]

    def _note_codes(self) -> None:
        """Global rank -> exit code, of the ranks that have ended."""
        for worker, process in zip(self._worker_group.workers, self._processes(), strict=False):
            if (code := process.poll()) is not None:
                self._codes[worker.global_rank] = code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
