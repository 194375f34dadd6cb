"""torch's rendezvous, which assigns ranks to a run's launchers. Reports errors in one line.

By default torch shares one store between its agent and the ranks. Restarted ranks then read the
addresses of the previous attempt and hang (pytorch#135712), so here each attempt gets its own
store.

Blocking calls into the store can be interrupted by signals. Python runs signal handlers only in the
main thread, between two bytecode instructions, so a main thread that is blocked in C++ does not
respond to SIGTERM. Therefore a second thread makes the call while the main thread waits in Python.
If the host of the store is suspended, a call to the store never returns, regardless of the timeout.
"""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from threading import Thread, Timer
from typing import Any, TypeVar, cast

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler

from launch.ranks.placement import Placement

T = TypeVar("T")

_JOIN_SECONDS = 600
_LAST_CALL_SECONDS = 30  # torch's default
# A host that does not respond within this time is considered lost.
_RESPONSE_SECONDS = 15
# A wait that takes longer than this is reported.
_REPORT_AFTER_SECONDS = 5


def interruptible(call: Callable[[], T], *, seconds: float | None = None) -> T:
    """Return the result of `call`, or raise its exception.

    Raises TimeoutError if the call takes longer than `seconds`. After a TimeoutError, or an
    exception raised by a signal handler, the call may still be running in its thread. The process
    should then exit with `os._exit` and not touch the objects that the call uses.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # raised again in the waiting thread
            future.set_exception(error)

    # A daemon thread, because a call that never returns must not keep the process alive.
    Thread(target=run, name="rendezvous", daemon=True).start()
    return future.result(seconds)


class InterruptibleRendezvous:
    """Passes the calls of torch's agent to a rendezvous handler. The only one that blocks during
    training can be interrupted.

    It has no timeout, so training continues if only the launcher on the host is suspended.
    `next_rendezvous` is not wrapped, because the agent already calls it in a second thread.
    """

    def __init__(self, handler: RendezvousHandler) -> None:
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def num_nodes_waiting(self) -> int:
        return interruptible(self._handler.num_nodes_waiting)


def open_rendezvous(placement: Placement) -> RendezvousHandler:
    """Return the rendezvous handler for torch's agent, once the host of the rendezvous is up.

    A static rendezvous connects later. Raises TimeoutError if the host does not respond within
    `join_timeout`, and RendezvousError or DistError if torch's rendezvous fails.
    """
    # Give each attempt its own store (see the module docstring).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    seconds = join_seconds(placement)
    # torch's client retries for this long, even if the name of the host does not resolve yet or the
    # connection breaks. The call is abandoned before that.
    timeout_seconds = 2 * seconds
    parameters = RendezvousParameters(
        backend="static" if placement.is_static else "c10d",
        endpoint=placement.endpoint,
        run_id=placement.run_id,
        min_nodes=placement.min_nodes,
        max_nodes=placement.max_nodes,
        local_addr=placement.local_addr or ("127.0.0.1" if placement.max_nodes == 1 else None),
        **{**placement.rdzv_conf, "read_timeout": str(timeout_seconds)},
    )
    if placement.is_static:
        parameters.config |= {"rank": placement.node_rank or 0, "timeout": timeout_seconds}
        return create_rdzv_handler(parameters)
    with report_waiting(placement, "the machine that hosts the rendezvous"):
        backend, store = interruptible(partial(create_backend, parameters), seconds=seconds)
    timeout = int(placement.rdzv_conf.get("read_timeout", _RESPONSE_SECONDS))
    store.set_timeout(timedelta(seconds=timeout))
    handler = InterruptibleRendezvous(create_handler(store, backend, parameters))
    return cast(RendezvousHandler, handler)


@contextmanager
def report_waiting(placement: Placement, what: str | None = None) -> Iterator[None]:
    """Print one line if the block waits for other machines for more than a few seconds."""
    if placement.max_nodes == 1:
        yield
        return
    least, most = placement.min_nodes, placement.max_nodes
    machines = f"{most} machines" if least == most else f"{least} to {most} machines"
    line = (
        f"waiting for {what or machines} at {placement.endpoint} "
        f"(join_timeout {join_seconds(placement)} s)"
    )
    # Print from a thread, because the main thread may be blocked in C++.
    timer = Timer(_REPORT_AFTER_SECONDS, print, (line,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def failure_reason(error: Exception, placement: Placement) -> str:
    """Describe the cause of the failure and a fix in one line."""
    where = f"the rendezvous at {placement.endpoint}"
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if "EADDRINUSE" in str(cause):
        return (
            f"{where} cannot start because its port is in use: stop the program that is listening "
            "on it, or choose another port on all machines"
        )
    match error:
        case TimeoutError():
            return (
                f"{where} does not respond: start or restart kway train on the machine that hosts "
                "it, and check that its port is open and not used by another program"
            )
        case RendezvousClosedError():
            return f"{where} is closed, because ranks on another machine failed: see their output"
        case RendezvousTimeoutError():
            return (
                f"{where} timed out with fewer than {placement.min_nodes} machines: start kway "
                "train on all of them, or raise --rdzv-conf join_timeout=SECONDS"
            )
        case RendezvousConnectionError():
            return (
                f"{where} was lost, because its host exited or the network failed: restart all "
                "machines"
            )
    return f"{where} failed: {' '.join(str(error).split())}"


def join_seconds(placement: Placement) -> int:
    """Return how long, in seconds, a launcher waits for the others to join."""
    return int(placement.rdzv_conf.get("join_timeout", _JOIN_SECONDS))


def longest_rendezvous(placement: Placement) -> int:
    """Return how many seconds torch itself allows for a rendezvous if the store responds."""
    last_call = int(placement.rdzv_conf.get("last_call_timeout", _LAST_CALL_SECONDS))
    return join_seconds(placement) + last_call + 2 * _RESPONSE_SECONDS
