"""The collectives of this rank, as torch's flight recorder tells them.

The recorder is a ring buffer that C++ fills for gloo and for NCCL, below DDP, FSDP and DeepSpeed
too. It is off unless TORCH_FR_BUFFER_SIZE is set before the process group is made.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_c10d as c10d

# gloo's and other CPU backends' recorder; NCCL has one of its own in builds for CUDA.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_POLLS_PER_READING = 10
_WHOLE_WORLD = "default_pg"


@dataclass(frozen=True)
class Collective:
    """One collective of a group of ranks; `number` counts the group's collectives from 1."""

    name: str
    number: int
    group: str

    def __str__(self) -> str:
        of_group = "" if self.group == _WHOLE_WORLD else f" of {self.group}"
        return f"{self.name} #{self.number}{of_group}"


@dataclass(frozen=True)
class RecordedCollectives:
    """`newest` is what this rank issued last; `pending` the oldest one that has not ended.

    `pending_seconds` is how long ago that was issued, by a clock that can be set.
    """

    newest: Collective | None
    pending: Collective | None
    pending_seconds: float = 0.0


class FlightRecorder:
    """Reads the recorder, in full only where that can tell something new.

    A full reading takes milliseconds in which no other Python code runs, and in a large world one
    rank or the other would be at it in every step. While collectives come and go nothing hangs.
    """

    def __init__(self) -> None:
        self._counts: list[Any] | None = None
        self._recorded = RecordedCollectives(None, None)
        self._has_read = False
        self._num_polls = 0

    def poll(self) -> RecordedCollectives:
        """What this process has issued and waits for; while it gets on, that of an earlier look."""
        counts = [dump(False)["pg_status"] for dump in _dumps()]
        stands = counts == self._counts
        self._has_read = self._has_read and stands
        self._counts = counts
        self._num_polls += 1
        # Of several groups one may hang while others get on.
        is_due = self._recorded.pending is not None or self._num_polls % _POLLS_PER_READING == 0
        if is_due or (stands and not self._has_read):
            self._recorded = self.read()
            self._has_read = True
        return self._recorded

    def read(self) -> RecordedCollectives:
        """What this process has issued and waits for, over all groups and backends."""
        entries = sorted(_entries(), key=lambda entry: entry["time_created_ns"])
        newest = _collective(entries[-1]) if entries else None
        pending = next((entry for entry in entries if entry["pending"]), None)
        if pending is None:
            return RecordedCollectives(newest, None)
        seconds = (time.time_ns() - pending["time_created_ns"]) / 1e9
        return RecordedCollectives(newest, _collective(pending), seconds)


def _dumps() -> list[Callable[[bool], dict[str, Any]]]:
    """Of each backend's recorder, what gives it as a dict, with its entries or without."""

    def reading(name: str) -> Callable[[bool], dict[str, Any]]:
        return lambda entries: json.loads(getattr(c10d, name)(entries, False))

    return [reading(name) for name in _DUMPS if hasattr(c10d, name)]


def _entries() -> Iterator[dict[str, Any]]:
    for dump in _dumps():
        recorder = dump(True)
        status = recorder["pg_status"] or {}
        for entry in recorder.get("entries", []):
            yield {**entry, "pending": is_pending(entry, status)}


def is_pending(entry: dict[str, Any], status: dict[str, Any]) -> bool:
    """Whether an entry of the recorder has not ended, given the `status` of all groups.

    Its `state` says nothing on gloo, where it stays "scheduled", and `retired` too little on NCCL:
    the parts of a coalesced collective, which share the number of the whole, are never retired.
    """
    if entry["retired"] or entry["is_p2p"]:
        return False
    group = status.get(str(entry["pg_id"]))
    return group is None or entry["collective_seq_id"] > int(group["last_completed_collective"])


def _collective(entry: dict[str, Any]) -> Collective:
    name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    # A group's name is made of numbers; what describes it is meant for people.
    title, description = entry["process_group"]
    return Collective(name, entry["collective_seq_id"], description or title)
