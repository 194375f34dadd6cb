"""Reads this rank's collectives from torch's flight recorder.

The recorder is a ring buffer that torch's C++ code fills for gloo and for NCCL, so it also covers
the collectives of DDP, FSDP and DeepSpeed. It is disabled unless TORCH_FR_BUFFER_SIZE is set before
the process group is created.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_c10d as c10d

# The recorder of gloo and other CPU backends, and the NCCL recorder, which exists only in CUDA
# builds.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_POLLS_PER_READING = 10
_WORLD_GROUP = "default_pg"


@dataclass(frozen=True)
class Collective:
    """One collective of a group of ranks. `number` counts the group's collectives from 1."""

    name: str
    number: int
    group: str

    def __str__(self) -> str:
        of_group = "" if self.group == _WORLD_GROUP else f" of {self.group}"
        return f"{self.name} #{self.number}{of_group}"


@dataclass(frozen=True)
class RecordedCollectives:
    """The collectives in the recorder: `newest` is the last one that this rank issued, and
    `pending` is the oldest one that has not completed.

    `pending_seconds` is the time since `pending` was issued. It is measured with the wall clock, so
    it is wrong if the clock was adjusted in the meantime.
    """

    newest: Collective | None
    pending: Collective | None
    pending_seconds: float = 0.0


class FlightRecorder:
    """Reads the recorder. It does a full read only at regular intervals and while a collective may
    be pending.

    A full read takes milliseconds and holds the GIL. In a large world, some rank would be reading
    during every step, which would slow down all ranks. As long as collectives complete, nothing
    hangs, so no full read is needed.
    """

    def __init__(self) -> None:
        self._counts: list[Any] | None = None
        self._recorded = RecordedCollectives(None, None)
        self._has_read = False
        self._num_polls = 0

    def poll(self) -> RecordedCollectives:
        """Return the newest and the pending collective of this process. While collectives complete,
        the result may come from an earlier full read.
        """
        counts = [dump(False)["pg_status"] for dump in _dumps()]
        unchanged = counts == self._counts
        self._has_read = self._has_read and unchanged
        self._counts = counts
        self._num_polls += 1
        # One of several groups may hang while others make progress, so do a full read regularly.
        is_due = self._recorded.pending is not None or self._num_polls % _POLLS_PER_READING == 0
        if is_due or (unchanged and not self._has_read):
            self._recorded = self.read()
            self._has_read = True
        return self._recorded

    def read(self) -> RecordedCollectives:
        """Return the newest and the pending collective of this process, over all groups and
        backends."""
        entries = sorted(_entries(), key=lambda entry: entry["time_created_ns"])
        newest = _collective(entries[-1]) if entries else None
        pending = next((entry for entry in entries if entry["pending"]), None)
        if pending is None:
            return RecordedCollectives(newest, None)
        seconds = (time.time_ns() - pending["time_created_ns"]) / 1e9
        return RecordedCollectives(newest, _collective(pending), seconds)


def _dumps() -> list[Callable[[bool], dict[str, Any]]]:
    """Return one function per backend. Each function returns the backend's recorder as a dict, with
    or without entries.
    """

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
    """Return whether a collective in the recorder is still pending, given the `status` of all
    groups.

    The fields `state` and `retired` are not sufficient. With gloo, `state` is always "scheduled".
    With NCCL, the parts of a coalesced collective, which share its sequence number, are never
    retired.
    """
    if entry["retired"] or entry["is_p2p"]:
        return False
    group = status.get(str(entry["pg_id"]))
    return group is None or entry["collective_seq_id"] > int(group["last_completed_collective"])


def _collective(entry: dict[str, Any]) -> Collective:
    name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    # Use the group's description, because its name consists only of numbers.
    title, description = entry["process_group"]
    return Collective(name, entry["collective_seq_id"], description or title)
