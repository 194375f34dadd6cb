"""Several "hosts" on this machine: network namespaces on a bridge, whose cables can be pulled."""

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
    """A network namespace with one address; `cable` is its end on the bridge."""

    name: str
    address: str
    cable: str

    @property
    def inside(self) -> tuple[str, ...]:
        """What runs a command on this host; its process id is the command's own."""
        return ("ip", "netns", "exec", self.name, "env", "GLOO_SOCKET_IFNAME=eth0")

    def cut(self) -> None:
        """Pull the cable: nothing comes through and nobody is told."""
        _ip("link", "set", self.cable, "down")

    def join(self) -> None:
        _ip("link", "set", self.cable, "up")


def why_there_are_none() -> str | None:
    """Why this machine lends no namespaces; None where it does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"kw{uuid.uuid4().hex[:8]}"
    try:
        _ip("netns", "add", name)
    except FileNotFoundError:
        return "there is no ip command: install iproute2"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


@contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """So many hosts that reach each other by their addresses; skips the test where there are none.

    What still runs on them is the caller's to end.
    """
    if reason := why_there_are_none():
        pytest.skip(reason)
    # Other sessions may have theirs: names are random, and so is the subnet.
    mark = uuid.uuid4().hex[:6]
    bridge, third = f"kwb{mark}", int(mark[:2], 16)
    made = [
        Host(f"kwn{mark}{n}", f"{_SUBNET}.{third}.{n + 1}", f"kwv{mark}{n}") for n in range(number)
    ]
    _ip("link", "add", bridge, "type", "bridge")
    try:
        _ip("link", "set", bridge, "up")
        for host in made:
            _plug(host, bridge)
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)
        _ip("link", "delete", bridge)


def _plug(host: Host, bridge: str) -> None:
    _ip("netns", "add", host.name)
    _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _ip("link", "set", host.cable, "master", bridge, "up")
    _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", host.name, "link", "set", device, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
