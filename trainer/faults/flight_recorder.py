"""Reads this rank's collectives from torch's flight recorder.

The recorder is a ring buffer that torch's C++ code fills for gloo and for NCCL, so it also covers
the collectives of DDP, FSDP and DeepSpeed. It is disabled unless TORCH_FR_BUFFER_SIZE is set before
the process group is created. torch documents these functions in its tutorial on the recorder; it
has no public one that a process can call for itself.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_c10d as c10d

# The recorder of gloo and other CPU backends, and the NCCL recorder, which exists only in CUDA
# builds.
_DUMPS = [
    getattr(c10d, name)
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    if hasattr(c10d, name)
]
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


class FlightRecorder:
    """The collectives in the recorder, over all groups and backends: `newest` is the last one that
    this rank issued, and `pending` is the oldest one that has not completed.

    `pending_seconds` is the time since `pending` was issued. It is measured with the wall clock, so
    it is wrong if the clock was adjusted in the meantime.
    """

    newest: Collective | None = None
    pending: Collective | None = None
    pending_seconds = 0.0

    def __init__(self) -> None:
        self._status: list[Any] = []
        self._num_polls = 0

    def poll(self) -> None:
        """Update the collectives. While collectives complete, they may be those of an earlier poll.

        A full read takes milliseconds and holds the GIL. In a large world, some rank would be
        reading during every step, which would slow down all ranks. As long as collectives complete,
        nothing hangs. One of several groups may hang while others make progress, so read regularly.
        """
        status = [json.loads(dump(False, False))["pg_status"] for dump in _DUMPS]
        self._num_polls += 1
        is_due = self.pending is not None or self._num_polls % _POLLS_PER_READING == 0
        if is_due or status == self._status:
            self.read()
        self._status = status

    def read(self) -> None:
        """Update the collectives with a full read."""
        entries = []
        for dump in _DUMPS:
            recorder = json.loads(dump(True, False))
            status = recorder["pg_status"] or {}
            entries += [(entry, is_pending(entry, status)) for entry in recorder.get("entries", [])]
        entries.sort(key=lambda each: each[0]["time_created_ns"])
        oldest = next((entry for entry, pending in entries if pending), None)
        self.newest = _collective(entries[-1][0]) if entries else None
        self.pending = _collective(oldest) if oldest else None
        if oldest:
            self.pending_seconds = (time.time_ns() - oldest["time_created_ns"]) / 1e9


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
