"""Starts the ranks of a training run on this machine through torch's elastic API.

torchrun turns every worker's exit code into 1; this returns the code that counts.
"""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

EXIT_FAILED = 1


def run_ranks(module: str, arguments: Sequence[str], *, num_processes: int) -> int:
    """Run `python -m module arguments…` as `num_processes` ranks; the first failure's exit code."""
    # The ranks' own line says what is wrong; the agent's report would bury it.
    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # As torchrun does: without it each rank starts a thread a core in every library.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
    )
    try:
        with _own_signal_handlers():
            # -P: a folder named data/ where the user stands must not hide the package.
            elastic_launch(config, sys.executable)("-P", "-u", "-m", module, *arguments)
    except ChildFailedError as failure:
        return _code_that_counts(failure)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Bring back this process's handlers on leaving: torch leaves its own behind."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _code_that_counts(failure: ChildFailedError) -> int:
    """Of all ranks' codes the one that tells most: a rank whose peer ends fails too, with 1."""
    codes = {rank: found.exitcode for rank, found in failure.failures.items()}
    for rank, code in codes.items():
        # The agent itself ends the other ranks by SIGTERM.
        if code < 0 and code != -signal.SIGTERM:
            name = signal.Signals(-code).name
            hint = ": out of memory?" if name == "SIGKILL" else ""
            print(f"error: rank {rank} was ended by {name}{hint}", file=sys.stderr)
            return 128 - code
    return next((code for code in codes.values() if code > EXIT_FAILED), EXIT_FAILED)
