"""Starts the ranks of this machine and returns the exit code of the run.

torchrun exits with 1 regardless of its ranks' exit codes, so this module runs torch's elastic agent
directly.
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

from launch.ranks.agent import Agent
from launch.ranks.placement import Placement
from launch.ranks.rendezvous import failure_reason, interruptible, open_rendezvous
from launch.ranks.stop import StopRequest
from trainer.process.exit_codes import FAILED, INTERRUPTED, PREEMPTED
from trainer.process.standard_output import tolerate_closed_output

_MONITOR_SECONDS = 0.2
_CLOSE_SECONDS = 60  # twice torch's own timeout


def run_ranks(module: str, arguments: Sequence[str], placement: Placement) -> int:
    """Run `python -m module arguments…` as this machine's ranks and return the run's exit code.

    Stop signals are forwarded to the ranks, which get `placement.shutdown_timeout` to save.
    """
    # torch's elastic logs would hide the error messages of the ranks.
    for name in list(logging.root.manager.loggerDict):  # each sets its own level
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    tolerate_closed_output()
    os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(placement.num_processes))
    # -P: a folder data/ in the current directory must not shadow the package of the same name.
    command = ("-P", "-u", "-m", module, *arguments)
    with StopRequest() as stop, TemporaryDirectory(prefix="kway-") as log_folder:
        try:
            rendezvous = open_rendezvous(placement)
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
            agent = Agent(spec, stop=stop, log_folder=log_folder, placement=placement)
        except SignalException as stopped:
            return INTERRUPTED if stopped.sigval == signal.SIGINT else PREEMPTED
        except (RendezvousError, dist.DistError, TimeoutError) as error:
            return _rendezvous_failed(error, placement)
        return _run(agent, placement, rendezvous)


def threads_per_rank(num_processes: int) -> int:
    """Return OMP_NUM_THREADS, or this rank's share of the cores if it is not set.

    By default every library would start one thread per core in each rank.
    """
    cores = len(os.sched_getaffinity(0)) // num_processes
    return int(os.environ.get("OMP_NUM_THREADS", max(1, cores)))


def _run(agent: Agent, placement: Placement, rendezvous: RendezvousHandler) -> int:
    try:
        result = agent.run()
    except SignalException as stopped:
        # Leave the rendezvous open: the other machines' ranks are still saving.
        return agent.code_after(stopped.sigval)
    except (RendezvousError, dist.DistError, TimeoutError) as error:
        # After these errors, the store would not respond to a close request either.
        if not isinstance(error, RendezvousConnectionError | TimeoutError):
            _close(rendezvous)
        return _rendezvous_failed(error, placement)
    _close(rendezvous)
    return agent.code or (FAILED if result is None or result.is_failed() else 0)


def _close(rendezvous: RendezvousHandler) -> None:
    # The ranks have already exited, so a stop signal has no effect.
    with suppress(SignalException, TimeoutError):
        interruptible(rendezvous.shutdown, seconds=_CLOSE_SECONDS)


def _rendezvous_failed(error: Exception, placement: Placement) -> int:
    print(f"error: {failure_reason(error, placement)}", file=sys.stderr, flush=True)
    return FAILED
