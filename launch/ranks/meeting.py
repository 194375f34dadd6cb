"""Where the launchers of a run meet and learn their ranks: torch's rendezvous, with clear words.

torch shares one store between its agent and the ranks; ranks that are started anew then read
addresses of those before and hang (pytorch#135712): each try gets a store of its own here.
"""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Timer

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    parse_rendezvous_endpoint,
)

from launch.ranks.placement import Placement

_DEFAULT_PORT = 29400
_JOIN_SECONDS = 600
# After this without an answer the host is lost; torch's minute outlasts the ranks themselves.
_ANSWER_SECONDS = 15
_RETRY_SECONDS = 0.5
# A wait that is longer is told.
_SECONDS_OF_SILENCE = 5


def meet(placement: Placement) -> RendezvousHandler:
    """The handler of torch's agent; waits for the machine that hosts the meeting.

    Raises TimeoutError where it does not come up in time, RendezvousError and DistError.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    parameters = RendezvousParameters(
        backend="static" if placement.is_static else "c10d",
        endpoint=placement.endpoint,
        run_id=placement.run_id,
        min_nodes=placement.min_nodes,
        max_nodes=placement.max_nodes,
        local_addr=placement.local_addr or _loopback(placement),
        **placement.rdzv_conf,
    )
    host, port = parse_rendezvous_endpoint(placement.endpoint, _DEFAULT_PORT)
    seconds = _patience(placement)
    if placement.is_static:
        rank = placement.node_rank or 0
        if rank:
            _wait_for_host(host, port, seconds, placement)
        parameters.config |= {"rank": rank, "timeout": seconds}
        return create_rdzv_handler(parameters)
    is_host = parameters.get_as_bool("is_host")
    if not (_matches_machine_hostname(host) if is_host is None else is_host):
        _wait_for_host(host, port, seconds, placement)
    backend, store = create_backend(parameters)
    answer = parameters.get_as_int("read_timeout", _ANSWER_SECONDS) or _ANSWER_SECONDS
    store.set_timeout(timedelta(seconds=answer))
    return create_handler(store, backend, parameters)


@contextmanager
def waiting(placement: Placement, what: str | None = None) -> Iterator[None]:
    """Says so, in one line, where the block takes a while: it waits for other machines."""
    if placement.max_nodes == 1:
        yield
        return
    least, most = placement.min_nodes, placement.max_nodes
    machines = f"{most} machines" if least == most else f"{least} to {most} machines"
    line = (
        f"waiting for {what or machines} at {placement.endpoint} "
        f"(join_timeout {_patience(placement)} s)"
    )
    # A thread: torch waits in C++ now and then.
    timer = Timer(_SECONDS_OF_SILENCE, print, (line,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def why_it_failed(error: Exception, placement: Placement) -> str:
    """One line with a remedy."""
    where = f"the meeting of the launchers at {placement.endpoint}"
    match error:
        case RendezvousClosedError():
            return f"{where} is over: another machine's ranks failed for good; see its output"
        case RendezvousTimeoutError():
            return (
                f"{where} ended with fewer than {placement.min_nodes} machines: start kway train "
                "on all of them, or give more time by --rdzv-conf join_timeout=SECONDS"
            )
        case RendezvousConnectionError():
            return f"{where} is lost: its host has ended or the network is cut; start all again"
    return f"{where} failed: {' '.join(str(error).split())}"


def _loopback(placement: Placement) -> str | None:
    return "127.0.0.1" if placement.max_nodes == 1 else None


def _patience(placement: Placement) -> int:
    return int(placement.rdzv_conf.get("join_timeout", _JOIN_SECONDS))


def _wait_for_host(host: str, port: int, seconds: float, placement: Placement) -> None:
    """In Python and not in torch's store, so that a signal to stop is heard meanwhile."""
    deadline = time.monotonic() + seconds
    with waiting(placement, "the machine that hosts the meeting"):
        while time.monotonic() < deadline:
            # Its name may not be known either before it is up.
            address = host, port
            with suppress(OSError), socket.create_connection(address, timeout=_RETRY_SECONDS * 4):
                return
            time.sleep(_RETRY_SECONDS)
    raise TimeoutError(
        f"{host}:{port} did not answer for {seconds:g} s: start kway train on the machine that "
        "hosts the meeting, and see that its port is open"
    )
