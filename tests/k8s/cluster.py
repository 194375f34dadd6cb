"""A namespace of a cluster, on this machine: manifests, claims, names, addresses and pods."""

import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.pods import Pod
from tests.k8s.volumes import Storage
from tests.system.hosts import Host, hosts


@dataclass
class Cluster:
    """A namespace: its manifests and claims, addresses for pods, and the pods that were started."""

    storage: Storage
    free: deque[Host]
    pods: list[Pod] = field(default_factory=list)
    # Names that stand for a pod's address, as those of a Service do.
    names: dict[str, str] = field(default_factory=dict)

    def start(self, name: str, template: Mapping[str, Any], **more: Any) -> Pod:
        """A pod of this template; `more` are the fields `host_name`, `annotations`, `variables`."""
        assert self.free, "no address is free: give the cluster more hosts"
        pod = Pod(self, name, template, self.free.popleft(), **more)
        self.pods.append(pod)
        pod.start()
        self.tell_names()
        return pod

    def give_back(self, host: Host) -> None:
        """The oldest is used next: a new pod seldom has the address of the one it replaces."""
        self.free.append(host)
        self.tell_names()

    def tell_names(self) -> None:
        """Every pod's /etc/hosts, in the same file: it is mounted."""
        known = [line for pod in self.pods if pod.exit_code is None for line in pod.service_names()]
        known += [f"{address} {name}" for name, address in self.names.items()]
        for pod in self.pods:
            pod.hosts_file.write_text("\n".join([*pod.own_names(), *known, ""]))

    @property
    def logs(self) -> str:
        """What every pod said, for a message."""
        return "\n".join(f"===== {pod.describe()}\n{pod.log}" for pod in self.pods)

    def end(self) -> None:
        for pod in self.pods:
            pod.end()


@contextmanager
def cluster(
    folder: Path, manifests: Sequence[dict[str, Any]], *, addresses: int
) -> Iterator[Cluster]:
    """An empty namespace with these manifests applied; skips the test where none is permitted.

    On leaving, all pods end with their processes, mounts and networks.
    """
    with hosts(addresses) as machines:
        _skip_without_mounts()
        made = Cluster(Storage(folder, manifests), deque(machines))
        try:
            yield made
        finally:
            made.end()


def _skip_without_mounts() -> None:
    tried = subprocess.run(
        [
            "unshare",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "mount",
            "-t",
            "tmpfs",
            "x",
            "/mnt",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        pytest.skip(f"namespaces of mounts and processes are not permitted: {tried.stderr.strip()}")
