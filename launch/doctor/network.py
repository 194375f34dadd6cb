"""Checks of the host name, the interfaces that gloo and NCCL select, ports, peers and clocks."""

import ctypes
import errno
import http.client
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import psutil

from launch.doctor.check import Finding, Workload, error, ok, warning

_CHOOSE = "set GLOO_SOCKET_IFNAME to the interface of the cluster network (see ip -brief address)"
_TIMEOUT_SECONDS = 3
_MAX_SKEW_SECONDS = 5
_TIME_ERROR = 5  # return value of adjtimex for an unsynchronized clock
_SET_CLOCKS = "synchronize the clocks of all machines: systemctl enable --now chrony"


def host_name(workload: Workload) -> Iterator[Finding]:
    """Check the addresses of the host name, on which gloo listens unless an interface is set."""
    name = socket.gethostname()
    addresses = _addresses(name)
    if not addresses:
        line = f"{name} does not resolve to an address: gloo falls back to loopback"
        yield warning("host name", line, f"add it to /etc/hosts or DNS, or {_CHOOSE}")
        return
    line = f"{name} resolves to {', '.join(addresses)}"
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        line += ", which other machines cannot reach"
        if workload.several_machines and "GLOO_SOCKET_IFNAME" not in os.environ:
            yield warning("host name", line, _CHOOSE)
            return
    yield ok("host name", line)


def gloo_interface(workload: Workload) -> Iterator[Finding]:
    """Check the interface that gloo uses."""
    present = psutil.net_if_addrs()
    if wanted := os.environ.get("GLOO_SOCKET_IFNAME"):
        missing = [name for name in wanted.split(",") if name not in present]
        if missing:
            line = f"GLOO_SOCKET_IFNAME is {wanted}: {', '.join(missing)} does not exist"
            yield error("interface", line, f"set it to one of {', '.join(present)}, or unset it")
        else:
            yield ok("interface", f"GLOO_SOCKET_IFNAME is {wanted}")
        return
    address = next((a for a in _addresses(socket.gethostname()) if _is_local(a)), "127.0.0.1")
    owners = [name for name, all_of in present.items() if address in {a.address for a in all_of}]
    # All of 127.0.0.0/8 is loopback; Debian maps the host name to 127.0.1.1.
    owner = owners[0] if owners else "lo"
    if owner == "lo":
        yield ok("interface", f"gloo uses lo ({address}), which reaches only this machine")
    else:
        yield ok("interface", f"gloo uses {owner} ({address})")


def nccl_interface(workload: Workload) -> Iterator[Finding]:
    """Check NCCL_SOCKET_IFNAME if it is set.

    Its value is a list of prefixes of interface names, or of exact names after `=`. A leading `^`
    negates the list.
    """
    wanted = os.environ.get("NCCL_SOCKET_IFNAME")
    if not wanted:
        return
    present = list(psutil.net_if_addrs())
    selected = [name for name in present if _nccl_selects(wanted, name)]
    if selected:
        yield ok("interface", f"NCCL_SOCKET_IFNAME={wanted} selects {', '.join(selected)}")
    else:
        line = f"NCCL_SOCKET_IFNAME={wanted} matches none of {', '.join(present)}"
        yield error("interface", line, "correct or unset it (see ip -brief address)")


def _nccl_selects(wanted: str, name: str) -> bool:
    is_negated, is_exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    names = wanted.lstrip("^=").split(",")
    matches = name in names if is_exact else any(name.startswith(prefix) for prefix in names)
    return matches != is_negated


def _addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _is_local(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as server:
        try:
            server.bind((address, 0))
        except OSError:
            return False
    return True


def ports(workload: Workload) -> Iterator[Finding]:
    """Check that loopback has a free port, and that the rendezvous port is free if one is given."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
    if workload.port is None:
        yield ok("ports", "loopback has free ports; pass --port N to check a rendezvous port")
        return
    with socket.socket() as server:
        # The rendezvous store also sets this option, so a port in TIME_WAIT counts as free.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", workload.port))
        except OSError as failure:
            what, remedy = _why_taken(workload.port, failure)
            yield error("ports", f"port {workload.port} cannot be used: {what}", remedy)
            return
    yield ok("ports", f"port {workload.port} is free for the rendezvous")


def _why_taken(port: int, failure: OSError) -> tuple[str, str]:
    if failure.errno != errno.EADDRINUSE:
        return failure.strerror or str(failure), "choose another port above 1023"
    # The system does not show which processes of other users own a connection.
    with suppress(psutil.AccessDenied):
        for connection in psutil.net_connections("tcp"):
            is_here = connection.laddr and connection.laddr.port == port
            if is_here and connection.status == psutil.CONN_LISTEN and connection.pid:
                with suppress(psutil.NoSuchProcess):
                    name = psutil.Process(connection.pid).name()
                    return f"process {connection.pid} ({name}) is listening on it", _other_port()
    return "another process is listening on it", _other_port()


def _other_port() -> str:
    return "stop that process, or choose another port in --rdzv-endpoint"


def clock(workload: Workload) -> Iterator[Finding]:
    """Check whether a time service synchronizes the clock, as reported by the kernel."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    # If `modes` is 0, adjtimex only reads the clock state. The struct has at most 208 bytes.
    reading = (ctypes.c_byte * 1024)()
    state = ctypes.CDLL(None).adjtimex(reading)
    if state != _TIME_ERROR:
        yield ok("clock", f"{now}, synchronized by a time service")
    elif workload.several_machines:
        yield warning("clock", f"{now}, not synchronized by a time service", _SET_CLOCKS)
    else:
        yield ok("clock", f"{now}, not synchronized, which matters only with several machines")


def peers(workload: Workload) -> Iterator[Finding]:
    """Check that each peer's port accepts connections, and that its clock is close to ours."""
    for peer in workload.peers:
        host, port = split_address(peer)
        try:
            skew = _clock_ahead(host, port)
        except (OSError, http.client.HTTPException) as failure:
            yield error(
                "peer",
                f"{peer} does not respond: {failure}",
                "start a server there (python -m http.server PORT) and open the port in firewalls",
            )
            continue
        if skew is None:
            yield ok("peer", f"{peer} responds, but not over HTTP, so its clock cannot be checked")
        elif abs(skew) > _MAX_SKEW_SECONDS:
            late = "ahead of" if skew > 0 else "behind"
            line = f"the clock of {peer} is {abs(skew):.0f} s {late} ours: the rendezvous may fail"
            yield error("peer", line, _SET_CLOCKS)
        else:
            yield ok("peer", f"{peer} responds; its clock is within {_MAX_SKEW_SECONDS} s of ours")


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`. Raises ValueError for any other format."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(
            f"--peer {address!r} is not HOST:PORT: pass an address such as node2:29400"
        )
    return host.strip("[]"), int(port)


def _clock_ahead(host: str, port: int) -> float | None:
    """Return by how many seconds the host's clock is ahead of ours, or None if unknown.

    Uses the `Date` header of an HTTP response, which has a resolution of one second.
    """
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
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
        remote = parsedate_to_datetime(date)
    except ValueError:
        return None
    return (remote - datetime.now(UTC)).total_seconds()
