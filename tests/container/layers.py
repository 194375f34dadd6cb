"""Roots made of layers, and commands that run in them: what a container engine does, by hand.

A root is an overlay of folders, mounted in a mount namespace of the command's own: nothing is left
mounted when it ends. Needs root.
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
    """Layers, the lowest first, and what a container of them starts with."""

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
class Place:
    """Where a command runs: `upper` takes what it writes, and is made where it is missing.

    A sealed place is a container's: a read-only root, /tmp and shared memory of its own, no
    capabilities, and a network of loopback alone.
    """

    layers: tuple[Path, ...]
    upper: Path
    mounts: tuple[Mount, ...] = ()
    sealed: bool = False

    def command(self, words: Sequence[str], image: Image) -> list[str]:
        """The command line that runs `words` here, as process 1 of a process namespace."""
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
            *(line for mount in self.mounts for line in _bound(mount, root)),
        ]
        lines += self._sealing(root) if self.sealed else []
        entered = ["exec", "chroot", str(root), *self.inside(words, image)]
        return "\n".join([*lines, shlex.join(entered)])

    def _sealing(self, root: Path) -> list[str]:
        return [
            "ip link set lo up",
            "hostname kway-0",
            f"echo 127.0.0.1 localhost kway-0 kway-0.kway > {root}/etc/hosts",
            f"mount -o remount,ro,bind {root}",
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp",
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/dev/shm",
        ]

    def inside(self, words: Sequence[str], image: Image) -> list[str]:
        """`words` with the image's user, folder and environment, once inside of the root."""
        user, _, group = image.user.partition(":")
        settings = [f"{name}={value}" for name, value in image.environment.items()]
        powers = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"] * self.sealed
        return [
            *("setpriv", f"--reuid={user}", f"--regid={group or user}", "--clear-groups", *powers),
            *("env", "--ignore-environment", f"--chdir={image.folder}", *settings, *words),
        ]


def _bound(mount: Mount, root: Path) -> list[str]:
    target = shlex.quote(f"{root}{mount.target}")
    source = shlex.quote(str(mount.source))
    made = f"mkdir -p {target}"
    if mount.source.is_file():
        made = f'mkdir -p "$(dirname {target})" && touch {target}'
    lines = [made, f"mount --bind {source} {target}"]
    return [*lines, f"mount -o remount,ro,bind {target}"] if mount.read_only else lines


def run(place: Place, words: Sequence[str], image: Image) -> None:
    """Run to the end, and take the mounts' empty places away; ends this program where it fails."""
    done = subprocess.run(place.command(words, image), check=False)
    if done.returncode != 0:
        sys.exit(f"error: {shlex.join(words)}: ended with {done.returncode}")
    for mount in place.mounts:
        point = place.upper / mount.target.strip("/")
        if point.is_dir():
            point.rmdir()
        else:
            point.unlink(missing_ok=True)


def megabytes(folder: Path) -> float:
    done = subprocess.run(
        ["du", "--summarize", "--block-size=1", folder], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[0]) / 1e6
