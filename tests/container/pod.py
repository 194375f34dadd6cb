"""A container of a manifest, or of the image's own command, running in the image's root."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tests.container.layers import Image, Mount, Place

# Volumes that a sealed place has anyway, and one that no cluster needs to have.
_OWN = {"scratch", "shared-memory", "credentials"}
_UID = 1000


@dataclass(frozen=True)
class Container:
    """What runs of an image, with which folders of this machine."""

    image: Image
    words: tuple[str, ...]
    mounts: tuple[Mount, ...] = ()

    def place(self, work: Path) -> Place:
        number = len(list(work.glob("container-*")))
        upper = work / f"container-{number:02}" / "upper"
        return Place(self.image.layers, upper, self.mounts, sealed=True)

    def run(self, work: Path) -> str:
        """Run to the end and return what was printed; ends this program where it fails."""
        command = self.place(work).command(self.words, self.image)
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(f"{done.stdout}\nerror: {self.words}: ended with {done.returncode}")
        return done.stdout


def of_manifest(
    image: Image, path: Path, name: str, folders: Path, settings: Mapping[str, str], *more: str
) -> Container:
    """Container `name` of a manifest, its claims being folders below `folders`.

    `settings` take the places of variables of its `env`; `more` are further arguments.
    """
    spec = _find(yaml.safe_load(path.read_text(encoding="utf-8")), name)
    variables = {
        each["name"]: settings.get(each["name"], each.get("value", "127.0.0.1"))
        for each in spec["env"]
    }
    words = [*spec.get("command", image.entrypoint), *spec.get("args", ()), *more]
    mounts = [
        Mount(folders / each["name"], each["mountPath"], each.get("readOnly", False))
        for each in spec["volumeMounts"]
        if each["name"] not in _OWN
    ]
    # As the kubelet: the image's environment, then the manifest's.
    environment = {**image.environment, **settings, **variables}
    as_told = replace(
        image, environment=environment, folder=spec["workingDir"], user=f"{_UID}:{_UID}"
    )
    return Container(as_told, tuple(_filled(word, variables) for word in words), tuple(mounts))


def probe_of_manifest(path: Path, name: str, kind: str) -> list[str]:
    spec = _find(yaml.safe_load(path.read_text(encoding="utf-8")), name)
    return list(spec[kind]["exec"]["command"])


def _find(tree: Any, name: str) -> dict[str, Any]:
    """The container of this name, wherever it stands in a manifest."""
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    if isinstance(tree, dict) and tree.get("name") == name and "volumeMounts" in tree:
        return tree
    return next(filter(None, (_find(branch, name) for branch in branches)), {})


def _filled(word: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word)


class Running:
    """A container that goes on: asked by its health check or probes, stopped by SIGTERM."""

    def __init__(self, container: Container, work: Path) -> None:
        self.container = container
        self.place = container.place(work)
        self.place.upper.parent.mkdir(parents=True)
        self.log = self.place.upper.with_name("log")
        command = self.place.command(container.words, container.image)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def first_process(self) -> int:
        """Process 1 of the container, by its number outside, once it is inside of its root."""
        own = self._process.pid
        while self._process.poll() is None:
            children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
            if children and os.readlink(f"/proc/{children[0]}/root") != "/":
                return int(children[0])
            time.sleep(0.1)
        sys.exit(f"{self.log.read_text()}\nerror: ended with {self._process.returncode}")

    def execute(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as an engine does for a health check."""
        spaces = ["--mount", "--pid", "--net", "--root", "--wd"]
        entered = ["nsenter", f"--target={self.first_process()}", *spaces]
        inside = self.place.inside(words, self.container.image)
        return subprocess.run([*entered, *inside], capture_output=True, text=True, check=False)

    def wait_until(self, words: Sequence[str], seconds: float) -> int:
        """Try `words` inside until they succeed; returns how often they failed before."""
        end = time.monotonic() + seconds
        failures = 0
        while (done := self.execute(words)).returncode != 0:
            if time.monotonic() > end:
                sys.exit(f"{self.log.read_text()}\nerror: {words} failed: {done.stderr}")
            failures += 1
            time.sleep(1)
        return failures

    def stop(self, seconds: float = 60) -> int:
        """SIGTERM to process 1, as `docker stop`; returns its exit code."""
        subprocess.run(["kill", "-TERM", str(self.first_process())], check=True)
        return self._process.wait(timeout=seconds)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # unshare takes the whole process namespace with it
        self._process.wait()
