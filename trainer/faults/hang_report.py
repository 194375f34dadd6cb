"""The state of a rank, and the one-line description of a hang from the states of all ranks.

The collectives come from torch's flight recorder, a ring buffer that torch's C++ code fills for
gloo and for NCCL, so it also covers the collectives of DDP, FSDP and DeepSpeed. It is disabled
unless TORCH_FR_BUFFER_SIZE is set before the process group is created. torch documents these
functions in its tutorial on the recorder; it has no public one that a process can call for itself.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
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
_GONE = "not responding (stopped, exited or unreachable)"
# The kinds of ranks in a hang, in the order of the report, and what to do about the first of them.
_SILENT, _ELSEWHERE, _WAITING = 0, 1, 2
_FIXES = (
    "check the machines and the network of the ranks that are not responding",
    "if this work is slow but correct, raise train.timeout_seconds",
    "check whether a rank skipped a collective, whether groups of ranks wait for each other, and "
    "the network between the ranks",
)


def num_completed() -> list[dict[str, str]]:
    """Return the number of completed collectives by group, for each backend.

    Reading these counters is cheap, unlike `last_collective`. The threads of gloo count without an
    order, so a count may stay one behind until the next collective.
    """
    return [
        {
            group: status["last_completed_collective"]
            for group, status in (json.loads(dump(False, False))["pg_status"] or {}).items()
        }
        for dump in _DUMPS
    ]


def last_collective() -> tuple[str, bool]:
    """Return the name of the oldest collective of this rank that is pending, over all groups and
    backends, and True. If there is none, return the last one that this rank issued, and False. The
    name is empty if the recorder is disabled.

    This takes milliseconds and holds the GIL.
    """
    entries = []
    for dump in _DUMPS:
        recorder = json.loads(dump(True, False))
        status = recorder["pg_status"] or {}
        entries += [(is_pending(each, status), each) for each in recorder.get("entries", [])]
    if not entries:
        return "", False
    entries.sort(key=lambda each: each[1]["time_created_ns"])
    waits, entry = next((each for each in entries if each[0]), entries[-1])
    kind = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    # Use the group's description, because its name consists only of numbers.
    title, description = entry["process_group"]
    group = description or title
    of_group = "" if group == _WORLD_GROUP else f" of {group}"
    return f"{kind} #{entry['collective_seq_id']}{of_group}", waits


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


def describe_hang(before: Sequence[RankState], after: Sequence[RankState]) -> str:
    """Return the description of a hang, given the states of all ranks at two points in time.

    A rank counts as unresponsive if its beat did not increase in between.
    """
    # In the order of `_FIXES`: the first kind explains the others.
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, (old, state) in enumerate(zip(before, after, strict=True)):
        if state.beat <= old.beat:
            groups[_SILENT, f"{_GONE}, last seen {state}"].append(rank)
        else:
            kind = _ELSEWHERE if state.waited_seconds is None else _WAITING
            groups[kind, str(state)].append(rank)
    parts = []
    for (kind, text), ranks in sorted(groups.items()):
        shown = ", ".join(map(str, ranks[:_MAX_RANKS]))
        if len(ranks) > _MAX_RANKS:
            shown += f" and {len(ranks) - _MAX_RANKS} more"
        part = f"rank{'s' if len(ranks) > 1 else ''} {shown}: {text}"
        if kind == _WAITING:
            part += f" for {max(after[rank].waited_seconds or 0 for rank in ranks):.0f} s"
        parts.append(part)
    # Keep the waiting ranks, which are in the last group, even if there are many groups.
    if len(parts) > _MAX_GROUPS:
        parts[_MAX_GROUPS - 1 : -1] = [f"{len(parts) - _MAX_GROUPS} more groups of ranks"]
    first, _ = min(groups)
    return f"{'; '.join(parts)}: {_FIXES[first]}"
