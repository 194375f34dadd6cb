"""Emulates containers with shell commands that create a separate root, user and process namespace.

The image is this machine's /usr, its Python and this checkout, read-only. Not emulated: CPU and
memory limits, seccomp profiles, masked paths in /proc, settings of an image, and `lifecycle` hooks.
"""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.k8s.environments import command
from tests.k8s.volumes import Command, Volume
from tests.system.processes import ROOT

_PATHS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
# This machine's Python and this checkout of kway.
_PYTHON = (sys.base_prefix, str(ROOT), sys.prefix)
PATH = ":".join((f"{sys.prefix}/bin", *_PATHS))
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
# Copied instead of mounted, because volumes are mounted below /etc.
_ETC = ("alternatives", "group", "ld.so.cache", "nsswitch.conf", "passwd", "services", "ssl")
_DEVICES = ("null", "zero", "full", "random", "urandom")
# The shell's first child is PID 1 of the new namespace, and the shell reports how it exited.
# `unshare --fork` does not: in util-linux 2.38 it exits with 1 if SIGKILL ends its child.
_FIRST = 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"'
_APART = ("unshare", "--pid", "sh", "-c", '"$@"; exit $?', "sh", "sh", "-c", _FIRST)
_FIELDS = {
    "args",
    "command",
    "env",
    "image",
    "lifecycle",
    "livenessProbe",
    "name",
    "ports",
    "readinessProbe",
    "resources",
    "securityContext",
    "startupProbe",
    "volumeMounts",
    "workingDir",
}


@dataclass(frozen=True)
class Container:
    """A container of a manifest and its variables. `security` is the pod's securityContext."""

    manifest: Mapping[str, Any]
    security: Mapping[str, Any]
    variables: Mapping[str, str]

    def __post_init__(self) -> None:
        assert not (unknown := self.manifest.keys() - _FIELDS), f"not emulated: {unknown}"

    @property
    def _working_dir(self) -> str:
        return str(self.manifest.get("workingDir", "/"))

    def lines(self, root: Path, hosts: Path, volumes: Mapping[str, Volume]) -> list[str]:
        """Return shell lines that run the container as PID 1; `root` and `hosts` become / and
        /etc/hosts."""
        root.mkdir(parents=True)
        user = (*self.as_user(), "env", f"--chdir={self._working_dir}")
        words = (*_APART, str(root), *user, *command(self.manifest, self.variables))
        exports = [f"export {name}={shlex.quote(v)}" for name, v in self.variables.items()]
        mounts = [shlex.join(line) for line in self._root(root, hosts, volumes)]
        # Use a subshell, so that the next container does not inherit these variables.
        return [*mounts, "(", *exports, f"exec {shlex.join(words)}", ")"]

    def as_user(self) -> list[str]:
        """Return a command prefix that sets the pod's user, groups and capabilities."""
        about = {**self.security, **self.manifest.get("securityContext", {})}
        user, group = about.get("runAsUser", 0), about.get("runAsGroup", 0)
        if about.get("runAsNonRoot") and user == 0:
            raise ValueError(f"{self.manifest['name']} would run as root: set runAsUser")
        groups = sorted({group, about.get("fsGroup", group)})
        words = ["setpriv", f"--reuid={user}", f"--regid={group}"]
        words.append(f"--groups={','.join(map(str, groups))}")
        if "ALL" in about.get("capabilities", {}).get("drop", ()):
            words += ["--bounding-set=-all", "--inh-caps=-all"]
        if not about.get("allowPrivilegeEscalation", True):
            words.append("--no-new-privs")
        return words

    def _root(self, root: Path, hosts: Path, volumes: Mapping[str, Volume]) -> Iterator[Command]:
        yield ("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root))
        yield from _image(root)
        yield from _devices(root)
        yield ("touch", f"{root}/etc/hosts")
        yield ("mount", "--bind", str(hosts), f"{root}/etc/hosts")
        yield ("mkdir", "-p", f"{root}{self._working_dir}")
        mounts = self.manifest.get("volumeMounts", ())
        for mount in sorted(mounts, key=lambda mount: str(mount["mountPath"])):
            assert mount.keys() <= {"name", "mountPath", "readOnly"}, f"not emulated: {mount}"
            volume, target = volumes[mount["name"]], f"{root}{mount['mountPath']}"
            read_only = volume.read_only or mount.get("readOnly", False)
            yield from _bound(str(volume.folder), target, read_only=read_only)
        targets = {Path(mount["mountPath"]) for mount in mounts}
        for name in _PYTHON:  # a volume, such as one on /tmp, may hide it
            if not targets.isdisjoint(Path(name).parents):
                yield from _bound(name, f"{root}{name}", read_only=True)
        if self.manifest.get("securityContext", {}).get("readOnlyRootFilesystem", False):
            yield ("mount", "-o", "remount,bind,ro", str(root))


def _bound(source: str, target: str, *, read_only: bool) -> Iterator[Command]:
    yield ("mkdir", "-p", target)
    yield ("mount", "--bind", source, target)
    if read_only:
        yield ("mount", "-o", "remount,bind,ro", target)


def _image(root: Path) -> Iterator[Command]:
    yield ("mkdir", "-p", *(f"{root}/{name}" for name in ("proc", "etc", "var/run")))
    yield ("mkdir", "-m", "1777", f"{root}/tmp")
    for name in (*_SYSTEM, "/sys", *_PYTHON):
        if Path(name).is_symlink():
            yield ("ln", "-s", os.readlink(name), f"{root}{name}")
        elif Path(name).exists():
            yield from _bound(name, f"{root}{name}", read_only=True)
    existing = (f"/etc/{name}" for name in _ETC if Path("/etc", name).exists())
    yield ("cp", "-a", *existing, f"{root}/etc")


def _devices(root: Path) -> Iterator[Command]:
    yield ("mkdir", "-p", f"{root}/dev/shm")
    for name in _DEVICES:
        yield ("touch", f"{root}/dev/{name}")
        yield ("mount", "--bind", f"/dev/{name}", f"{root}/dev/{name}")
    yield ("ln", "-s", "/proc/self/fd", f"{root}/dev/fd")
    # The default of a container without a volume at /dev/shm.
    yield ("mount", "-t", "tmpfs", "-o", "mode=1777,size=64m", "tmpfs", f"{root}/dev/shm")
