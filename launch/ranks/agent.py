"""torch's elastic agent with graceful shutdown.

The agent waits for ranks that are saving, forwards signals, derives the run's exit code from the
ranks' exit codes, and restarts the ranks only after retryable failures. A rank killed by signal n
has the exit code -n, as in the `subprocess` module.
"""

import signal
import sys
import time
from collections.abc import Iterable
from functools import partial

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import WorkerState as State
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from launch.ranks.placement import Placement
from launch.ranks.rendezvous import interruptible, longest_rendezvous, report_waiting
from launch.ranks.stop import Processes, StopRequest, end_processes, wait_until_ended
from trainer.process.exit_codes import BAD_INPUT, DONE, INTERRUPTED, KILLED, PREEMPTED

# Ranks that fail have nothing left to save, but may still print output.
_OUTPUT_SECONDS = 10
# torch caches the rendezvous state, which lists the waiting machines, for one second.
_CACHED_STATE_SECONDS = 1.5
_POLL_SECONDS = 0.1


class Agent(LocalElasticAgent):
    """Runs the ranks of one machine."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        stop: StopRequest,
        log_folder: str,
        placement: Placement,
    ) -> None:
        logs = DefaultLogsSpecs(log_folder)
        super().__init__(spec, logs_specs=logs, shutdown_timeout=placement.shutdown_timeout)
        self._placement = placement
        self._codes: dict[int, int] = {}
        self._stop = stop
        self._killed = False

    @property
    def code(self) -> int:
        """The run's exit code, derived from the ranks that have exited so far."""
        return run_exit_code(self._codes.values())

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        self._pcontext, self._codes = None, {}  # discard the exit codes of the previous attempt
        super()._initialize_workers(worker_group)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with report_waiting(self._placement):
            interruptible(
                partial(super()._rendezvous, worker_group),
                seconds=longest_rendezvous(self._placement),
            )

    def _exit_barrier(self) -> None:
        interruptible(super()._exit_barrier)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._record_codes()
        if PREEMPTED in self._codes.values():
            # All ranks save. The one that commits the checkpoint exits last, so wait for all.
            wait_until_ended(self._processes(), self._placement.shutdown_timeout)
            self._record_codes()
        if any(self._codes.values()):
            # If a rank was killed, the other ranks only detect a lost peer and print nothing
            # useful, so kill them immediately. This can lose a checkpoint that rank 0 is about to
            # commit, but the commit takes only milliseconds.
            was_killed = -signal.SIGKILL in self._codes.values()
            seconds = 0 if was_killed else _OUTPUT_SECONDS
            end_processes(self._processes(), signal.SIGTERM, seconds, repeat=True)
        result = super()._monitor_workers(worker_group)
        if result.state is not State.FAILED:
            return result
        if not any(self._codes.values()):
            # A rank exited between `_record_codes` and torch's own check, so torch terminated the
            # other ranks. Use the exit codes that torch recorded.
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            self._codes |= own_exit_codes(codes)
        return self._handle_failure(result)

    def _handle_failure(self, failed: RunResult) -> RunResult:
        """Decide whether to restart. If a signal killed a rank, print which signal."""
        if self.code == PREEMPTED and self._has_waiting_machine():
            # Another launcher noticed the new machine first and made all ranks save. This is not
            # a failure: the ranks restart in a larger world.
            return RunResult(state=State.HEALTHY)
        if not is_retryable(self.code):
            self._remaining_restarts = 0
        why, restarts = kill_reason(self._codes), self.get_worker_group().spec.max_restarts
        if self._remaining_restarts:
            number = restarts - self._remaining_restarts + 1
            _print(f"{why or 'a rank failed'}; restart {number} of {restarts}")
        elif why:
            _print(f"error: {why}")
        return failed

    def _has_waiting_machine(self) -> bool:
        if self.get_worker_group().group_world_size == self._placement.max_nodes:
            return False
        deadline = time.monotonic() + _CACHED_STATE_SECONDS
        handler = self.get_worker_group().spec.rdzv_handler
        while not (waiting := handler.num_nodes_waiting() > 0):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        return waiting

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None
    ) -> None:
        """Signal the ranks to save and exit, wait, and kill the rest. Ctrl-C skips the wait."""
        seconds = self._placement.shutdown_timeout if timeout is None else timeout
        # Signal only the ranks, not their process groups: a rank that is saving needs its loaders.
        # Ctrl-C is forwarded as SIGTERM; `code_after` maps the ranks' exit code to INTERRUPTED.
        number = signal.SIGTERM if death_sig == signal.SIGINT else death_sig
        self._killed |= end_processes(self._processes(), number, seconds, stop=self._stop)
        super()._shutdown(death_sig, seconds)

    def code_after(self, number: signal.Signals) -> int:
        """Return the run's exit code if this signal has stopped the launcher."""
        self._record_codes()
        stopped = INTERRUPTED if number == signal.SIGINT else PREEMPTED
        if self._stop.is_urgent or not self._codes:  # there were no ranks yet
            return stopped
        if self._killed:
            _print(
                f"error: some ranks did not exit within {self._placement.shutdown_timeout} s of "
                f"{number.name} and were killed, so the steps since the last checkpoint are lost: "
                "raise --shutdown-timeout"
            )
            return KILLED + signal.SIGKILL
        if why := kill_reason(self._codes):
            _print(f"error: {why}")
        return stopped if self.code == PREEMPTED else self.code

    def _processes(self) -> Processes:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handler.proc for handler in handlers.values()]

    def _record_codes(self) -> None:
        """Record the exit codes of the ranks that have exited."""
        for worker, process in zip(
            self.get_worker_group().workers, self._processes(), strict=False
        ):
            if (code := process.poll()) is not None:
                self._codes[worker.global_rank] = code


# A rank killed by one of these signals had not installed its handlers yet and therefore had not run
# a step. It counts as preempted.
_PREEMPTING = (-signal.SIGTERM, -signal.SIGUSR1, -signal.SIGHUP)


def run_exit_code(codes: Iterable[int]) -> int:
    """Return the most specific exit code. When one rank exits, the others often fail with 1."""
    found = [_as_exit_code(code) for code in codes if code != DONE]
    killed = [code for code in found if code > KILLED and code != INTERRUPTED]
    if killed:
        return killed[0]
    for code in (BAD_INPUT, PREEMPTED, INTERRUPTED):
        if code in found:
            return code
    return max(found, default=DONE)


def _as_exit_code(code: int) -> int:
    if code in _PREEMPTING:
        return PREEMPTED
    return KILLED - code if code < 0 else code


def own_exit_codes(codes: dict[int, int]) -> dict[int, int]:
    """Return the exit codes by rank. Omits ranks terminated because another rank had failed."""
    own = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}
    return own or codes


def is_retryable(code: int) -> bool:
    """Return whether another attempt may succeed."""
    return code not in (DONE, BAD_INPUT, PREEMPTED, INTERRUPTED)


def kill_reason(codes: dict[int, int]) -> str | None:
    """Describe the first rank killed by a signal, or return None. codes: rank -> exit code."""
    for rank, code in codes.items():
        if code < 0 and code not in _PREEMPTING:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return f"rank {rank} was killed by {signal.Signals(-code).name}{hint}"
    return None


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
