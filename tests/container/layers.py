"""Like a container engine, runs commands in a root file system made of layers. Requires root.

The root file system is an overlay of folders in a separate mount namespace, so nothing remains
mounted when the command ends.
"""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    """Layers, lowest first, and the configuration of the containers that use them."""

    layers: tuple[Path, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: {"PATH": _SEARCH_PATH})
    user: str = "0:0"
    folder: str = "/"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    health: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mount:
    source: Path
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class Sandbox:
    """A root in which commands run. They write to `upper`, which is created if it is missing.

    sealed: isolate commands as in a container, with a read-only root, a separate /tmp and shared
    memory, no capabilities, and only a loopback network.
    """

    layers: tuple[Path, ...]
    upper: Path
    mounts: tuple[Mount, ...] = ()
    sealed: bool = False

    def command(self, words: Sequence[str], image: Image) -> list[str]:
        """Return the command line that runs `words` in the sandbox as PID 1 of a namespace."""
        flags = ["--mount", "--pid", "--fork", "--kill-child", *["--net", "--uts"] * self.sealed]
        return ["unshare", *flags, "sh", "-ec", self._script(words, image)]

    def _script(self, words: Sequence[str], image: Image) -> str:
        root, work = self.upper.with_name("root"), self.upper.with_name("overlay-work")
        for folder in (root, work, self.upper):
            folder.mkdir(parents=True, exist_ok=True)
        lower = ":".join(str(layer) for layer in reversed(self.layers))
        options = f"lowerdir={lower},upperdir={self.upper},workdir={work}"
        lines = [
            f"mount -t overlay overlay -o {shlex.quote(options)} {root}",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            *(line for mount in self.mounts for line in _mount_lines(mount, root)),
        ]
        lines += self._sealing_lines(root) if self.sealed else []
        entered = ["exec", "chroot", str(root), *self.inside(words, image)]
        return "\n".join([*lines, shlex.join(entered)])

    def _sealing_lines(self, root: Path) -> list[str]:
        return [
            "ip link set lo up",
            "hostname kway-0",
            f"echo 127.0.0.1 localhost kway-0 kway-0.kway > {root}/etc/hosts",
            f"mount -o remount,ro,bind {root}",
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp",
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/dev/shm",
        ]

    def inside(self, words: Sequence[str], image: Image) -> list[str]:
        """Return the command that runs `words` with the image's user, folder and environment."""
        user, _, group = image.user.partition(":")
        settings = [f"{name}={value}" for name, value in image.environment.items()]
        limits = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"] * self.sealed
        return [
            *("setpriv", f"--reuid={user}", f"--regid={group or user}", "--clear-groups", *limits),
            *("env", "--ignore-environment", f"--chdir={image.folder}", *settings, *words),
        ]


def _mount_lines(mount: Mount, root: Path) -> list[str]:
    target = shlex.quote(f"{root}{mount.target}")
    source = shlex.quote(str(mount.source))
    create = f"mkdir -p {target}"
    if mount.source.is_file():
        create = f'mkdir -p "$(dirname {target})" && touch {target}'
    lines = [create, f"mount --bind {source} {target}"]
    return [*lines, f"mount -o remount,ro,bind {target}"] if mount.read_only else lines


def run(sandbox: Sandbox, words: Sequence[str], image: Image) -> None:
    """Run a command and remove the empty mount points. Exits this program if the command fails."""
    done = subprocess.run(sandbox.command(words, image), check=False, timeout=600)
    if done.returncode != 0:
        sys.exit(f"error: {shlex.join(words)}: exited with {done.returncode}")
    for mount in sandbox.mounts:
        point = sandbox.upper / mount.target.strip("/")
        if point.is_dir():
            point.rmdir()
        else:
            point.unlink(missing_ok=True)


def megabytes(folder: Path) -> float:
    done = subprocess.run(
        ["du", "--summarize", "--block-size=1", folder],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return int(done.stdout.split()[0]) / 1e6
