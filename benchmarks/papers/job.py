"""A job: one measurement, made once and kept under a digest of its function and settings."""

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Part of every key: increment it to discard all kept results.
_FORMAT = 1

Measures = dict[str, Any]

# Among the measures of a job that makes shards: the name of their folder. Without it they are made
# anew.
FOLDER = "folder"


@dataclass(frozen=True)
class Places:
    """Where jobs find what they need: the user's `data`, and `shards` made of it; `work` is the
    job's own folder, which is there again when a job that was cut off is run anew."""

    data: Path
    shards: Path
    work: Path


@dataclass(frozen=True)
class Job:
    """`function` ("module:name" below benchmarks.papers) is called with (settings, places) and
    returns measures; settings and measures are JSON. `alone`: it times something, so nothing else
    may run meanwhile, and it has all cores."""

    function: str
    settings: Mapping[str, Any]
    alone: bool = False

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> str:
        """Names the kept result; equal jobs are measured once, whoever asks."""
        asked = json.dumps([_FORMAT, self.function, self.settings], sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()[:20]

    def resolve(self) -> Callable[[Mapping[str, Any], Places], Measures]:
        module, _, name = self.function.partition(":")
        found: Any = getattr(importlib.import_module(f"benchmarks.papers.{module}"), name)
        return found


@dataclass(frozen=True)
class Result:
    """What a job measured, and the seconds that it took one worker, now or when it was measured."""

    measures: Measures
    seconds: float

    def __getitem__(self, name: str) -> Any:
        return self.measures[name]


Results = dict[Job, Result]
