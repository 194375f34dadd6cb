"""The state of a rank, and the one-line description of a hang from the states of all ranks.

The collectives come from torch's flight recorder, a ring buffer that torch's C++ code fills for
gloo and for NCCL, so it also covers the collectives of DDP, FSDP and DeepSpeed. It is disabled
unless TORCH_FR_BUFFER_SIZE is set before the process group is created. torch documents these
functions in its tutorial on the recorder; it has no public one that a process can call for itself.
"""

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_c10d as c10d

# The recorder of gloo and other CPU backends, and that of NCCL, which only CUDA builds have.
_DUMPS = [
    getattr(c10d, name)
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    if hasattr(c10d, name)
]
_WORLD_GROUP = "default_pg"
# Only a few groups of ranks, and ranks of a group, are listed, so that the line stays readable.
_MAX_GROUPS, _MAX_RANKS = 8, 16
_SILENT, _ELSEWHERE, _WAITING = 0, 1, 2
_GONE = "not responding (stopped, exited or unreachable)"


class FlightRecorder:
    """The collectives of this rank, over all groups and backends.

    `waited_seconds` is how long the oldest collective that has not completed has been pending, or
    None if all have completed. `name` is this collective if there is one, otherwise the last one
    that this rank issued.
    """

    waited_seconds: float | None = None
    name = ""

    def __init__(self) -> None:
        self._completed: dict[tuple[int, str], int] = {}
        # For each group with a pending collective, when the last one before it completed.
        self._since: dict[tuple[int, str], float] = {}

    def poll(self) -> None:
        """Update the state. While collectives complete, `name` may be that of an earlier poll.

        A full read takes milliseconds and holds the GIL. In a large world, some rank would be
        reading during every step, which would slow down all ranks. As long as collectives complete,
        nothing hangs. The counters of each group are cheap to read.
        """
        now, completed, pending = time.monotonic(), {}, []
        for number, dump in enumerate(_DUMPS):
            for group, status in (json.loads(dump(False, False))["pg_status"] or {}).items():
                key = number, group
                completed[key] = int(status["last_completed_collective"])
                if int(status["last_enqueued_collective"]) > completed[key]:
                    pending.append(key)
        self._since = {
            key: self._since[key]
            if key in self._since and completed[key] == self._completed[key]
            else now
            for key in pending
        }
        self.waited_seconds = now - min(self._since.values()) if pending else None
        # The threads of gloo count completed collectives without an order, so a count may stay
        # behind until the next collective. The entries of a full read are right.
        if (completed == self._completed or self.waited_seconds) and not self.read():
            self.waited_seconds, self._since = None, {}
        self._completed = completed

    def read(self) -> bool:
        """Update `name` with a full read, and return whether a collective is pending."""
        entries = []
        for dump in _DUMPS:
            recorder = json.loads(dump(True, False))
            status = recorder["pg_status"] or {}
            entries += [(is_pending(each, status), each) for each in recorder.get("entries", [])]
        entries.sort(key=lambda each: each[1]["time_created_ns"])
        is_waiting = any(pending for pending, _ in entries)
        if entries:
            oldest = next((entry for pending, entry in entries if pending), entries[-1][1])
            kind = oldest["profiling_name"].partition(":")[2] or oldest["profiling_name"]
            # Use the group's description, because its name consists only of numbers.
            title, description = oldest["process_group"]
            group = description or title
            of_group = "" if group == _WORLD_GROUP else f" of {group}"
            self.name = f"{kind} #{oldest['collective_seq_id']}{of_group}"
        return is_waiting


def is_pending(entry: dict[str, Any], status: dict[str, Any]) -> bool:
    """Return whether a collective in the recorder is still pending, given the `status` of all
    groups.

    With NCCL, the parts of a coalesced collective, which share its sequence number, are never
    retired. With gloo, they are, but the last completed number of `status` also counts
    point-to-point messages.
    """
    if entry["retired"] or entry["is_p2p"]:
        return False
    if entry["profiling_name"].startswith("gloo:"):
        return True
    group = status.get(str(entry["pg_id"]))
    return group is None or entry["collective_seq_id"] > int(group["last_completed_collective"])


@dataclass(frozen=True)
class RankState:
    """The state of a rank. `beat` increases while the rank is alive. `waited_seconds` is how long
    the rank has been waiting in `collective`, or None if it is the last one, which has completed.
    `location` is the line that the main thread is executing: `module:line`.
    """

    beat: int
    step: int
    phase: str
    location: str
    collective: str
    waited_seconds: float | None

    def __str__(self) -> str:
        phase = f" in {self.phase}" if self.phase else ""
        where = f"at step {self.step}{phase}{f' ({self.location})' if self.location else ''}"
        if self.waited_seconds is not None:
            return f"waiting in {self.collective} {where}"
        return f"{where}, after {self.collective}" if self.collective else where


def describe_hang(
    before: Mapping[int, RankState], after: Mapping[int, RankState], *, size: int
) -> str:
    """Return the description of a hang, given the states of all ranks at two points in time.

    A rank counts as unresponsive if its state is missing or if its beat did not increase in
    between. `size` is the world size.
    """
    # Unresponsive ranks first, then those outside collectives, then those that wait.
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank in range(size):
        old, state = before.get(rank), after.get(rank)
        if state is None:
            groups[_SILENT, _GONE].append(rank)
        elif old is not None and state.beat <= old.beat:
            groups[_SILENT, f"{_GONE}, last seen {state}"].append(rank)
        else:
            groups[_ELSEWHERE if state.waited_seconds is None else _WAITING, str(state)].append(
                rank
            )
    first, _ = min(groups)
    if first == _SILENT:
        fix = "check the machines and the network of the ranks that are not responding"
    elif first == _ELSEWHERE:
        fix = "if this work is slow but correct, raise train.timeout_seconds"
    elif len({state.collective for state in after.values()}) > 1:
        fix = (
            "check whether a rank skipped a collective or groups of ranks are waiting for each "
            "other"
        )
    else:
        fix = "check the network between the ranks, because all of them have entered the collective"
    parts = []
    for (kind, text), ranks in sorted(groups.items()):
        seconds = max(after[rank].waited_seconds or 0 for rank in ranks) if kind == _WAITING else 0
        shown = ", ".join(map(str, ranks[:_MAX_RANKS]))
        if len(ranks) > _MAX_RANKS:
            shown += f" and {len(ranks) - _MAX_RANKS} more"
        parts.append(
            f"rank{'s' if len(ranks) > 1 else ''} {shown}: {text}"
            + (f" for {seconds:.0f} s" if kind == _WAITING else "")
        )
    # Keep the waiting ranks, which are in the last group, even if there are many groups.
    if len(parts) > _MAX_GROUPS:
        parts[_MAX_GROUPS - 1 : -1] = [f"{len(parts) - _MAX_GROUPS} more groups of ranks"]
    return f"{'; '.join(parts)}: {fix}"
