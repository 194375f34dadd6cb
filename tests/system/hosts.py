"""Several "hosts" on this machine: network namespaces that are connected by a bridge."""

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

_SUBNET = "10.213"


@dataclass(frozen=True)
class Host:
    """A network namespace with one address. `cable` is the interface that connects it to the
    bridge.
    """

    name: str
    address: str
    cable: str

    @property
    def inside(self) -> tuple[str, ...]:
        """The command prefix that runs a command on this host. The command keeps its process ID."""
        return ("ip", "netns", "exec", self.name, "env", "GLOO_SOCKET_IFNAME=eth0")


def why_unavailable() -> str | None:
    """Return the reason why this machine cannot create network namespaces, or None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"kw{uuid.uuid4().hex[:8]}"
    try:
        _ip("netns", "add", name)
    except FileNotFoundError:
        return "the ip command is missing: install iproute2"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


@contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """Create hosts that can reach each other by address. Skips the test on machines that do not
    support network namespaces.

    The caller must stop the processes that are still running on them.
    """
    if reason := why_unavailable():
        pytest.skip(reason)
    # The names and the subnet are random because other test sessions may also create hosts.
    mark = uuid.uuid4().hex[:6]
    bridge, third = f"kwb{mark}", int(mark[:2], 16)
    created = [
        Host(f"kwn{mark}{n}", f"{_SUBNET}.{third}.{n + 1}", f"kwv{mark}{n}") for n in range(number)
    ]
    _ip("link", "add", bridge, "type", "bridge")
    try:
        _ip("link", "set", bridge, "up")
        for host in created:
            _plug(host, bridge)
        yield created
    finally:
        for host in created:
            subprocess.run(
                ["ip", "netns", "delete", host.name], capture_output=True, check=False, timeout=60
            )
        _ip("link", "delete", bridge)


def _plug(host: Host, bridge: str) -> None:
    _ip("netns", "add", host.name)
    _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _ip("link", "set", host.cable, "master", bridge, "up")
    _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", host.name, "link", "set", device, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True, timeout=60)
