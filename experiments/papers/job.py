"""A job: one measurement, made once and stored under a digest of its function and settings."""

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Part of every key: increment it to discard all stored results.
_FORMAT = 1

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
        """The name of the stored result. Identical jobs share it, so they are measured once."""
        identity = json.dumps([_FORMAT, self.function, self.settings], sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()[:20]

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
