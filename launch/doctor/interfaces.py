"""Which network interface gloo and NCCL take, by the same rules as they do."""

import os
import socket
from collections.abc import Iterator

import psutil

from launch.doctor.finding import Finding, error, ok, warning
from launch.doctor.plans import Plans

_CHOOSE = "set GLOO_SOCKET_IFNAME to the interface that the other machines reach: ip -brief address"


def host_name(plans: Plans) -> Iterator[Finding]:
    """What this machine's name stands for: gloo listens there unless it is told an interface."""
    name = socket.gethostname()
    addresses = _addresses(name)
    if not addresses:
        line = f"{name} resolves to no address: gloo falls back to loopback"
        yield warning("host name", line, f"add it to /etc/hosts or DNS, or {_CHOOSE}")
        return
    line = f"{name} is {', '.join(addresses)}"
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        line += ", which other machines cannot reach"
        if plans.several_machines and "GLOO_SOCKET_IFNAME" not in os.environ:
            yield warning("host name", line, _CHOOSE)
            return
    yield ok("host name", line)


def gloo(plans: Plans) -> Iterator[Finding]:
    """The interface of gloo's connections."""
    present = psutil.net_if_addrs()
    if wanted := os.environ.get("GLOO_SOCKET_IFNAME"):
        missing = [name for name in wanted.split(",") if name not in present]
        if missing:
            line = f"GLOO_SOCKET_IFNAME is {wanted}: there is no {', '.join(missing)}"
            yield error("interface", line, f"choose of {', '.join(present)}, or unset it")
        else:
            yield ok("interface", f"GLOO_SOCKET_IFNAME is {wanted}")
        return
    address = next((a for a in _addresses(socket.gethostname()) if _is_local(a)), "127.0.0.1")
    owners = [name for name, all_of in present.items() if address in {a.address for a in all_of}]
    # All of 127.0.0.0/8 is loopback, and Debian gives the host's name 127.0.1.1.
    owner = owners[0] if owners else "lo"
    if owner == "lo":
        yield ok("interface", f"gloo takes lo ({address}): ranks of this machine only")
    else:
        yield ok("interface", f"gloo takes {owner} ({address})")


def nccl(plans: Plans) -> Iterator[Finding]:
    """NCCL_SOCKET_IFNAME, where it is set: prefixes, exact after `=`, all others after `^`."""
    wanted = os.environ.get("NCCL_SOCKET_IFNAME")
    if not wanted:
        return
    present = list(psutil.net_if_addrs())
    taken = [name for name in present if _nccl_takes(wanted, name)]
    if taken:
        yield ok("interface", f"NCCL_SOCKET_IFNAME={wanted} takes {', '.join(taken)}")
    else:
        line = f"NCCL_SOCKET_IFNAME={wanted} fits no interface of {', '.join(present)}"
        yield error("interface", line, "correct or unset it: ip -brief address")


def _nccl_takes(wanted: str, name: str) -> bool:
    others, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    names = wanted.lstrip("^=").split(",")
    fits = name in names if exact else any(name.startswith(prefix) for prefix in names)
    return fits != others


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
