"""Runs a container of a manifest, or the image's own command, in the image's root."""

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

from tests.container.layers import Image, Mount, Sandbox

# The sandbox already provides the first two of these volumes, and the third is optional.
_PROVIDED = {"scratch", "shared-memory", "credentials"}
_UID = 1000


@dataclass(frozen=True)
class Container:
    """A command of an image, with folders of this machine mounted."""

    image: Image
    words: tuple[str, ...]
    mounts: tuple[Mount, ...] = ()

    def sandbox(self, work: Path) -> Sandbox:
        number = len(list(work.glob("container-*")))
        upper = work / f"container-{number:02}" / "upper"
        return Sandbox(self.image.layers, upper, self.mounts, sealed=True)

    def run(self, work: Path) -> str:
        """Run the command and return its output. Exits this program if the command fails."""
        command = self.sandbox(work).command(self.words, self.image)
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=600,
        )
        if done.returncode != 0:
            sys.exit(f"{done.stdout}\nerror: {self.words}: exited with {done.returncode}")
        return done.stdout


def of_manifest(
    image: Image, path: Path, name: str, folders: Path, settings: Mapping[str, str], *more: str
) -> Container:
    """Return container `name` of a manifest, with folders in `folders` mounted as its volumes.

    settings: values that override variables in its `env`. more: additional arguments.
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
        if each["name"] not in _PROVIDED
    ]
    # Like the kubelet: the image's environment, then the manifest's.
    environment = {**image.environment, **settings, **variables}
    configured = replace(
        image, environment=environment, folder=spec["workingDir"], user=f"{_UID}:{_UID}"
    )
    return Container(configured, tuple(_expanded(word, variables) for word in words), tuple(mounts))


def probe_of_manifest(path: Path, name: str, kind: str) -> list[str]:
    spec = _find(yaml.safe_load(path.read_text(encoding="utf-8")), name)
    return list(spec[kind]["exec"]["command"])


def _find(tree: Any, name: str) -> dict[str, Any]:
    """Return the container with this name, found anywhere in a manifest."""
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    if isinstance(tree, dict) and tree.get("name") == name and "volumeMounts" in tree:
        return tree
    return next(filter(None, (_find(branch, name) for branch in branches)), {})


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word)


class Running:
    """A running container that supports health checks and probes, and is stopped with SIGTERM."""

    def __init__(self, container: Container, work: Path) -> None:
        self.container = container
        self.sandbox = container.sandbox(work)
        self.sandbox.upper.parent.mkdir(parents=True)
        self.log = self.sandbox.upper.with_name("log")
        command = self.sandbox.command(container.words, container.image)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def first_process(self) -> int:
        """Return the outer process ID of the container's PID 1, once it has entered its root."""
        own = self._process.pid
        while self._process.poll() is None:
            children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
            if children and os.readlink(f"/proc/{children[0]}/root") != "/":
                return int(children[0])
            time.sleep(0.1)
        sys.exit(f"{self.log.read_text()}\nerror: exited with {self._process.returncode}")

    def execute(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as an engine does for a health check."""
        spaces = ["--mount", "--pid", "--net", "--root", "--wd"]
        entered = ["nsenter", f"--target={self.first_process()}", *spaces]
        inside = self.sandbox.inside(words, self.container.image)
        return subprocess.run(
            [*entered, *inside], capture_output=True, text=True, check=False, timeout=600
        )

    def wait_until(self, words: Sequence[str], seconds: float) -> int:
        """Run a command in the container until it succeeds, and return the number of failures."""
        end = time.monotonic() + seconds
        failures = 0
        while (done := self.execute(words)).returncode != 0:
            if time.monotonic() > end:
                sys.exit(f"{self.log.read_text()}\nerror: {words} failed: {done.stderr}")
            failures += 1
            time.sleep(1)
        return failures

    def stop(self, seconds: float = 60) -> int:
        """Send SIGTERM to PID 1, like `docker stop`, and return its exit code."""
        subprocess.run(["kill", "-TERM", str(self.first_process())], check=True, timeout=600)
        return self._process.wait(timeout=seconds)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # unshare then kills the complete process namespace
        self._process.wait(60)
