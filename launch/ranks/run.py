"""Starts the ranks of this machine and gives back the exit code that counts.

torchrun turns every rank's exit code into 1, so this drives torch's elastic agent itself.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryDirectory

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError

from data.retry import TransientError
from launch.ranks.agent import Agent
from launch.ranks.placement import Placement
from launch.ranks.rendezvous import failure_reason, open_rendezvous
from launch.ranks.stop import StopRequest
from trainer.process.exit_codes import FAILED, INTERRUPTED, PREEMPTED
from trainer.process.standard_output import tolerate_closed_output

_MONITOR_SECONDS = 0.2


def run_ranks(module: str, arguments: Sequence[str], placement: Placement) -> int:
    """Run `python -m module arguments…` as this machine's ranks; the exit code that counts.

    A signal to stop is passed on to the ranks, who get `placement.shutdown_seconds` to save.
    """
    _silence_torch()
    tolerate_closed_output()
    # Without it each rank starts a thread a core in every library.
    cores = len(os.sched_getaffinity(0)) // placement.num_processes
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
    # -P: a folder named data/ where the user stands must not hide the package.
    command = ("-P", "-u", "-m", module, *arguments)
    with StopRequest() as stop, TemporaryDirectory(prefix="kway-") as log_folder:
        try:
            rendezvous = open_rendezvous(placement)
            agent = _agent(command, placement, rendezvous, log_folder, stop)
        except SignalException as stopped:
            return INTERRUPTED if stopped.sigval == signal.SIGINT else PREEMPTED
        except (RendezvousError, dist.DistError, TimeoutError, TransientError) as error:
            return _rendezvous_failed(error, placement)
        return _run(agent, placement, rendezvous)


def _run(agent: Agent, placement: Placement, rendezvous: RendezvousHandler) -> int:
    try:
        result = agent.run()
    except SignalException as stopped:
        # Leave the rendezvous open: the other machines' ranks are still saving.
        return agent.code_after(stopped.sigval)
    except (RendezvousError, dist.DistError, TimeoutError) as error:
        # After these errors the store would not answer a close either.
        if not isinstance(error, RendezvousConnectionError | TimeoutError):
            _close(rendezvous)
        return _rendezvous_failed(error, placement)
    _close(rendezvous)
    return agent.code or (FAILED if result is None or result.is_failed() else 0)


def _close(rendezvous: RendezvousHandler) -> None:
    # The ranks have already ended: ignore a signal to stop.
    with suppress(SignalException):
        rendezvous.shutdown()


def _rendezvous_failed(error: Exception, placement: Placement) -> int:
    print(f"error: {failure_reason(error, placement)}", file=sys.stderr, flush=True)
    return FAILED


def _agent(
    command: tuple[str, ...],
    placement: Placement,
    rendezvous: RendezvousHandler,
    log_folder: str,
    stop: StopRequest,
) -> Agent:
    spec = WorkerSpec(
        role="trainer",
        local_world_size=placement.num_processes,
        entrypoint=sys.executable,
        args=command,
        rdzv_handler=rendezvous,
        max_restarts=placement.max_restarts,
        monitor_interval=_MONITOR_SECONDS,
        master_addr=placement.master_addr,
        master_port=placement.master_port if placement.is_static else None,
        local_addr=placement.local_addr,
    )
    return Agent(spec, stop=stop, log_folder=log_folder, placement=placement)


def _silence_torch() -> None:
    """The ranks' own line says what is wrong; the agent's report would bury it."""
    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
