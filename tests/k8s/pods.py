"""Emulates pods of rendered manifests on this machine with kernel namespaces.

A pod has a network with an address, a host name and volumes; its containers run one after another.
Not emulated: NetworkPolicies, service accounts, several containers in parallel, the effects of
probes (`Pod.execute` runs one), and DNS names that depend on readiness. Unknown fields are errors.
"""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.k8s.containers import PATH, Container
from tests.k8s.environments import environment
from tests.process_tree import children
from tests.system.hosts import Host
from tests.system.runs import send

if TYPE_CHECKING:
    from tests.k8s.cluster import Cluster

NAMESPACE = "default"
_SECONDS = 60
_FIELDS = {
    "containers",
    "enableServiceLinks",
    "initContainers",
    "restartPolicy",
    "securityContext",
    "subdomain",
    "terminationGracePeriodSeconds",
    "topologySpreadConstraints",
    "volumes",
    "automountServiceAccountToken",
}


@dataclass
class Pod:
    """One pod, started once. A controller adds the `variables` to each container."""

    cluster: "Cluster"
    name: str
    template: Mapping[str, Any]
    host: Host
    host_name: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    # Drained or evicted: has the condition DisruptionTarget.
    disrupted: bool = False
    exit_code: int | None = None
    _process: "subprocess.Popen[bytes] | None" = None
    _kill_at: float | None = None

    # ------------------------------------------------------------------ the manifest
    @property
    def spec(self) -> Mapping[str, Any]:
        return self.template["spec"]

    @property
    def labels(self) -> Mapping[str, str]:
        return self.template.get("metadata", {}).get("labels", {})

    @property
    def container(self) -> Mapping[str, Any]:
        (only,) = self.spec["containers"]
        return only

    @property
    def terminating(self) -> bool:
        return self._kill_at is not None

    def environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        annotations = {**self.template.get("metadata", {}).get("annotations", {})}
        annotations |= self.annotations
        fields = {
            "metadata.name": self.name,
            "metadata.namespace": NAMESPACE,
            "status.podIP": self.host.address,
            "spec.nodeName": os.uname().nodename,
            **{f"metadata.labels['{key}']": value for key, value in self.labels.items()},
            **{f"metadata.annotations['{key}']": value for key, value in annotations.items()},
        }
        given = {"PATH": PATH, "HOSTNAME": self.host_name or self.name}
        # A controller appends to `env`.
        return environment(container, given, fields) | dict(self.variables)

    def _described(self, container: Mapping[str, Any]) -> Container:
        security = self.spec.get("securityContext", {})
        return Container(container, security, self.environment(container))

    def _script(self) -> str:
        """Return the script of the pod's first process: volumes, then one container at a time."""
        group = self.spec.get("securityContext", {}).get("fsGroup")
        volumes = {
            volume["name"]: self.cluster.storage.volume(volume, self.folder, group)
            for volume in self.spec.get("volumes", ())
        }
        lines = [shlex.join(("hostname", self.host_name or self.name))]
        lines += [shlex.join(line) for volume in volumes.values() for line in volume.prepared]
        for container in (*self.spec.get("initContainers", ()), self.container):
            root = self.folder / "roots" / container["name"]
            lines += self._described(container).lines(root, self.hosts_file, volumes)
        return "\n".join([*lines, ""])

    # ------------------------------------------------------------------ names
    @property
    def _in_service(self) -> bool:
        subdomain = self.spec.get("subdomain")
        return any(
            manifest["kind"] == "Service"
            and manifest["metadata"]["name"] == subdomain
            and manifest["spec"].get("clusterIP") == "None"
            and manifest["spec"]["selector"].items() <= self.labels.items()
            for manifest in self.cluster.storage.manifests
        )

    def _names(self) -> list[str]:
        """Return the pod's DNS names, including the short names that search domains complete."""
        short = f"{self.host_name}.{self.spec.get('subdomain')}"
        long = f"{short}.{NAMESPACE}"
        return [f"{long}.svc.cluster.local", short, long, f"{long}.svc"]

    def service_names(self) -> list[str]:
        """Return the DNS entry from a headless Service that selects the pod, if there is one."""
        found = self.host_name and self._in_service
        return [f"{self.host.address} {' '.join(self._names())}"] if found else []

    def own_names(self) -> list[str]:
        host = self.host_name or self.name
        full = self._names()[0] if self.host_name and "subdomain" in self.spec else host
        return ["127.0.0.1 localhost", f"{self.host.address} {full} {host}"]

    # ------------------------------------------------------------------ life cycle
    @cached_property
    def folder(self) -> Path:
        folder = self.cluster.storage.folder / "pods" / self.name
        folder.mkdir(parents=True)
        return folder

    @property
    def hosts_file(self) -> Path:
        return self.folder / "hosts"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def start(self) -> None:
        assert not (unknown := self.spec.keys() - _FIELDS), f"not emulated: {unknown}"
        for path in (self.hosts_file, self.folder / "log"):
            path.touch()
        script = self.folder / "script"
        script.touch(mode=0o600)  # it contains variables, some of them secret
        script.write_text(self._script())
        inside = ["ip", "netns", "exec", self.host.name]
        own = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*inside, *own, "--mount-proc", "sh", "-e", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": PATH},
                start_new_session=True,
            )

    def first_process(self) -> int:
        """Return the ID of the process that is PID 1 of the running container, or 0."""
        below = [self._process.pid] if self._process else []
        # unshare, the pod's shell, the container's shell, the container
        for _ in range(3):
            below = [child for pid in below for child in children(pid)]
        return below[0] if below else 0

    def kill(self) -> None:
        """Kill the container's PID 1. When it exits, the kernel kills all other processes."""
        self._send(signal.SIGKILL)

    def delete(self) -> None:
        """Delete the pod: SIGTERM, and SIGKILL after its grace period."""
        if self.exit_code is None and not self.terminating:
            grace = self.spec.get("terminationGracePeriodSeconds", 30)
            self._kill_at = time.monotonic() + grace
            self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        if pid := self.first_process():
            send(pid, number)

    def evict(self) -> None:
        """Delete the pod as draining its node would."""
        self.disrupted = True
        self.delete()

    def look(self) -> int | None:
        """Return the exit code, or None while the pod is running."""
        if self.exit_code is None and self._process is not None:
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self.kill()
            if (code := self._process.poll()) is not None:
                self._ended(code)
        return self.exit_code

    def end(self) -> None:
        """Kill the pod immediately, with all of its processes."""
        if self.exit_code is not None or self._process is None:
            return
        # Kill the pod's PID 1. unshare then waits until the kernel has killed all the others.
        for pid in children(self._process.pid) or [self._process.pid]:
            send(pid, signal.SIGKILL)
        self._ended(self._process.wait(_SECONDS))

    def _ended(self, code: int) -> None:
        self.exit_code = code if code >= 0 else 128 - code
        self.cluster.release(self.host)

    def describe(self) -> str:
        state = "runs" if self.exit_code is None else f"exited with {self.exit_code}"
        return f"pod {self.name} ({self.host.address}) {state}"

    def execute(self, *words: str, given: str = "") -> "subprocess.CompletedProcess[str]":
        """Run a command in the container, as `kubectl exec` and probes do. `given` is its standard
        input."""
        names = ["--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd"]
        enter = ["nsenter", "--target", str(self.first_process()), *names]
        return subprocess.run(
            [*enter, *self._described(self.container).as_user(), *words],
            capture_output=True,
            text=True,
            input=given,
            timeout=_SECONDS,
            env=self.environment(self.container),
            check=False,
        )
