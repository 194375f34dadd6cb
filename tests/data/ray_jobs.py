"""Functions that tests run in a driver of a Ray cluster, in a process of its own."""

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.classes.class_list import ClassInfo
from data.sources import Sample, Source
from tests.data.ray_cluster import RayCluster
from tests.ranks import forked


@dataclass(frozen=True)
class Numbers(Source):
    """The first `train` numbers as texts, and three for testing. Each takes `seconds` to render."""

    train: int
    seconds: float = 0.0

    kind = "numbers"
    modality = "text"

    def parameters(self) -> dict[str, Any]:
        return {"train": self.train}

    def classes(self) -> tuple[ClassInfo, ...]:
        return (ClassInfo(name="even"), ClassInfo(name="odd"))

    def splits(self) -> dict[str, Sequence[int]]:
        return {"train": range(self.train), "test": range(self.train, self.train + 3)}

    def render(self, task: int) -> Sample:
        time.sleep(self.seconds)
        return Sample(f"{task:04d}", f"number {task}".encode(), "txt", task % 2)


class Driver:
    """A process that runs `function(*arguments)` with the environment of `cluster`. `log` contains
    its standard error."""

    def __init__(
        self, cluster: RayCluster, folder: Path, function: Callable[..., None], *arguments: Any
    ) -> None:
        self._errors = folder / f"driver-{time.monotonic_ns()}.txt"
        self.log = self._errors.with_suffix(".log")
        files = str(self._errors), str(self.log)
        self.process = forked(_run, cluster.environment, files, function, arguments)
        self.process.start()

    def finish(self) -> str:
        """Return the error with which the function failed, or an empty text."""
        self.process.join(240)
        assert self.process.exitcode == 0, self.log.read_text()
        return self._errors.read_text()


def _run(
    environment: dict[str, str],
    files: tuple[str, str],
    function: Callable[..., None],
    arguments: Any,
) -> None:
    errors, log = files
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(environment)
    text = ""
    try:
        function(*arguments)
    except (ValueError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    Path(errors).write_text(text)
