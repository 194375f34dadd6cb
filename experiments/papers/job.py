"""A job: one measurement, made once and stored under a digest of its settings and its code."""

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import hardware
from experiments.papers.provenance import code_digest

Measures = dict[str, Any]

# The key under which the measures of a shard job contain the name of its folder. If the folder is
# missing, the shards are made again.
FOLDER = "folder"


@dataclass(frozen=True)
class Folders:
    """The folders of a job: the user's `data`, the `shards` made from it, and its own `work`.

    `work` is kept until the job has finished, so that an interrupted job can resume.
    """

    data: Path
    shards: Path
    work: Path


@dataclass(frozen=True)
class Job:
    """A call of `function` ("module:name" below experiments.papers) with (settings, folders).

    It returns measures. Settings and measures are JSON. `alone`: the job measures times, so no
    other job runs at the same time and it uses all cores.
    """

    function: str
    settings: Mapping[str, Any]
    alone: bool = False

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> str:
        """The name of the stored result. Identical jobs share it, so they are measured once.

        It depends on the settings, the code of the function and of what it imports, the version of
        torch and, if the job measures times, the machine.
        """
        file = inspect.getsourcefile(self.resolve())
        assert file is not None, "the function of a job is defined in a file"
        identity = [
            *(self.function, self.settings, code_digest(Path(file).resolve())),
            *(str(torch.__version__), hardware() if self.alone else ""),
        ]
        text = json.dumps(identity, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def resolve(self) -> Callable[[Mapping[str, Any], Folders], Measures]:
        module, _, name = self.function.partition(":")
        found: Any = getattr(importlib.import_module(f"experiments.papers.{module}"), name)
        return found


@dataclass(frozen=True)
class Result:
    """The measures of a job, and the seconds that it took on one worker."""

    measures: Measures
    seconds: float

    def __getitem__(self, name: str) -> Any:
        return self.measures[name]


Results = dict[Job, Result]
