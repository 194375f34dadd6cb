"""Ports here, the other machines, and the clocks of both."""

import ctypes
import errno
import http.client
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import psutil

from launch.doctor.finding import Finding, error, ok, warning
from launch.doctor.plans import Plans

_PATIENCE_SECONDS = 3
_MOST_SKEW_SECONDS = 5
_TIME_ERROR = 5  # what adjtimex returns for a clock that nothing keeps right
_SET_CLOCKS = "keep the clocks of all machines right: systemctl enable --now chrony"


def ports(plans: Plans) -> Iterator[Finding]:
    """A free port on loopback, and the rendezvous port where one is named."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
    if plans.port is None:
        yield ok("ports", "loopback gives free ones; --port N looks at a rendezvous port")
        return
    with socket.socket() as server:
        # As the rendezvous store does; a port that was just left is free.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", plans.port))
        except OSError as failure:
            what, remedy = _taken(plans.port, failure)
            yield error("ports", f"port {plans.port} cannot be used: {what}", remedy)
            return
    yield ok("ports", f"port {plans.port} is free for the rendezvous")


def _taken(port: int, failure: OSError) -> tuple[str, str]:
    if failure.errno != errno.EADDRINUSE:
        return failure.strerror or str(failure), "choose another, above 1023"
    # Of other users' processes the system tells no number.
    with suppress(psutil.AccessDenied):
        for connection in psutil.net_connections("tcp"):
            is_here = connection.laddr and connection.laddr.port == port
            if is_here and connection.status == psutil.CONN_LISTEN and connection.pid:
                with suppress(psutil.NoSuchProcess):
                    name = psutil.Process(connection.pid).name()
                    return f"process {connection.pid} ({name}) listens there", _other_port()
    return "another process listens there", _other_port()


def _other_port() -> str:
    return "end that process, or choose another port in --rdzv-endpoint"


def clock(plans: Plans) -> Iterator[Finding]:
    """Whether the kernel says that a time service keeps the clock right."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    # adjtimex without a mode only reads; the struct is 208 bytes at most.
    reading = (ctypes.c_byte * 1024)()
    state = ctypes.CDLL(None).adjtimex(reading)
    if state != _TIME_ERROR:
        yield ok("clock", f"{now}, kept right by a time service")
    elif plans.several_machines:
        yield warning("clock", f"{now}; no time service keeps it right", _SET_CLOCKS)
    else:
        yield ok("clock", f"{now}; no time service, which matters between machines only")


def peers(plans: Plans) -> Iterator[Finding]:
    """Each peer: does its port answer, and how far is its clock from ours?"""
    for peer in plans.peers:
        host, port = split_address(peer)
        try:
            skew = _clock_ahead(host, port)
        except (OSError, http.client.HTTPException) as failure:
            yield error(
                "peer",
                f"{peer} does not answer: {failure}",
                "start something there (python -m http.server PORT) and open the port in between",
            )
            continue
        if skew is None:
            yield ok("peer", f"{peer} answers; its clock is not known: it speaks no HTTP")
        elif abs(skew) > _MOST_SKEW_SECONDS:
            late = "ahead of" if skew > 0 else "behind"
            line = f"{peer} is {abs(skew):.0f} s {late} this machine: the rendezvous would split"
            yield error("peer", line, _SET_CLOCKS)
        else:
            yield ok("peer", f"{peer} answers; its clock is within {_MOST_SKEW_SECONDS} s of ours")


def split_address(address: str) -> tuple[str, int]:
    """`host:port` as its two parts; ValueError where it is not that."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"--peer {address!r} is not HOST:PORT, as in node2:29400")
    return host.strip("[]"), int(port)


def _clock_ahead(host: str, port: int) -> float | None:
    """Seconds by the `Date` of an HTTP answer, whole ones; None where it gives none."""
    connection = http.client.HTTPConnection(host, port, timeout=_PATIENCE_SECONDS)
    connection.connect()
    try:
        connection.request("HEAD", "/")
        date = connection.getresponse().getheader("Date")
    except (TimeoutError, ConnectionError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    if date is None:
        return None
    try:
        told = parsedate_to_datetime(date)
    except ValueError:
        return None
    return (told - datetime.now(UTC)).total_seconds()
