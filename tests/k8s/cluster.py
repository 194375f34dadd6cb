"""Emulates a namespace of a cluster on this machine: manifests, claims, DNS, addresses and pods."""

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
    """A namespace: manifests and claims, free addresses for pods, and the pods started so far."""

    storage: Storage
    free: deque[Host]
    pods: list[Pod] = field(default_factory=list)
    # DNS name -> address of a pod, as for a Service.
    names: dict[str, str] = field(default_factory=dict)

    def start(self, name: str, template: Mapping[str, Any], **more: Any) -> Pod:
        """Start a pod. `more` contains the fields `host_name`, `annotations` and `variables` of
        `Pod`."""
        assert self.free, "no address is free: pass a larger number of addresses"
        pod = Pod(self, name, template, self.free.popleft(), **more)
        self.pods.append(pod)
        pod.start()
        self.update_hosts()
        return pod

    def release(self, host: Host) -> None:
        """Release an address. A new pod seldom gets the address of the pod it replaces."""
        self.free.append(host)
        self.update_hosts()

    def update_hosts(self) -> None:
        """Rewrite the /etc/hosts of every pod in place, because the file is mounted."""
        known = [line for pod in self.pods if pod.exit_code is None for line in pod.service_names()]
        known += [f"{address} {name}" for name, address in self.names.items()]
        for pod in self.pods:
            pod.hosts_file.write_text("\n".join([*pod.own_names(), *known, ""]))

    @property
    def logs(self) -> str:
        """The logs of all pods, for an assertion message."""
        return "\n".join(f"===== {pod.describe()}\n{pod.log}" for pod in self.pods)

    def end(self) -> None:
        for pod in self.pods:
            pod.end()


@contextmanager
def cluster(
    folder: Path, manifests: Sequence[dict[str, Any]], *, addresses: int
) -> Iterator[Cluster]:
    """Yield a namespace without pods, with these manifests applied.

    Skips the test if namespaces are not permitted. On exit, all pods are removed with their
    processes, mounts and networks.
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
        timeout=120,
    )
    if tried.returncode:
        pytest.skip(f"mount and process namespaces are not permitted: {tried.stderr.strip()}")
