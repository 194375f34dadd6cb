"""The state of a rank, and the one-line description of a hang from the states of all ranks.

The collectives come from torch's flight recorder, a ring buffer that torch's C++ code fills for
gloo and for NCCL, so it also covers the collectives of DDP, FSDP and DeepSpeed. It is disabled
unless TORCH_FR_BUFFER_SIZE is set before the process group is created. torch documents these
functions in its tutorial on the recorder; it has no public one that a process can call for itself.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch._C import _distributed_c10d as c10d

# The recorder of gloo and other CPU backends, and that of NCCL, which only CUDA builds have.
_DUMPS = [
    getattr(c10d, name)
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    if hasattr(c10d, name)
]
_POLLS_PER_READING = 10
_WORLD_GROUP = "default_pg"
# Only the first few groups of ranks are listed, so that the line stays readable.
_MAX_GROUPS = 4
_GONE = "not responding (stopped, exited or unreachable)"


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


@dataclass(frozen=True)
class RankState:
    """The state of a rank. `beat` increases while the rank is alive. `waited_seconds` is how long
    the rank has been waiting in `pending`. `location` is the line that the main thread is
    executing: `module:line`.
    """

    beat: int
    step: int
    phase: str
    location: str
    newest: Collective | None
    pending: Collective | None
    waited_seconds: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "RankState":
        fields = json.loads(text)
        for name in ("newest", "pending"):
            fields[name] = fields[name] and Collective(**fields[name])
        return RankState(**fields)

    def __str__(self) -> str:
        phase = f" in {self.phase}" if self.phase else ""
        where = f"at step {self.step}{phase}{f' ({self.location})' if self.location else ''}"
        if self.pending is not None:
            return f"waiting in {self.pending} {where}"
        return f"{where}, after {self.newest}" if self.newest else where


def describe_hang(
    before: Mapping[int, RankState], after: Mapping[int, RankState], *, size: int
) -> str:
    """Return the description of a hang, given the states of all ranks at two points in time.

    A rank counts as unresponsive if its state is missing or if its beat did not increase in
    between. `size` is the world size.
    """
    silent: dict[str, list[int]] = {}
    elsewhere: dict[str, list[int]] = {}
    waiting: dict[str, list[int]] = {}
    for rank in range(size):
        old, state = before.get(rank), after.get(rank)
        if state is None:
            silent.setdefault(_GONE, []).append(rank)
        elif old is not None and state.beat <= old.beat:
            silent.setdefault(f"{_GONE}, last seen {state}", []).append(rank)
        else:
            group = elsewhere if state.pending is None else waiting
            group.setdefault(str(state), []).append(rank)
    pending = {after[ranks[0]].pending for ranks in waiting.values()}
    # Ranks at the same location are listed with the longest wait among them.
    waiting = {
        f"{text} for {max(after[rank].waited_seconds for rank in ranks):.0f} s": ranks
        for text, ranks in waiting.items()
    }
    if silent:
        fix = "check the machines and the network of the ranks that are not responding"
    elif elsewhere:
        fix = "if this work is slow but correct, raise train.timeout_seconds"
    elif len(pending) > 1:
        fix = (
            "check whether a rank skipped a collective or groups of ranks are waiting for each "
            "other"
        )
    else:
        fix = "check the network between the ranks, because all of them have entered the collective"
    parts = [
        *_listed(silent, "not responding"),
        *_listed(elsewhere, "at other locations"),
        *_listed(waiting, "waiting at other locations"),
    ]
    return f"{'; '.join(parts)}: {fix}"


def describe_lost_store(own: RankState, *, rank: int, host: str) -> str:
    """Return the description of a hang for a rank that cannot read the states of the other
    ranks.
    """
    return (
        f"{host}, which hosts the store of the process group, is not responding (stopped, exited "
        f"or unreachable); {format_ranks([rank])}: {own} for {own.waited_seconds:.0f} s: check "
        "that machine and its network"
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text: `rank 3`, or `ranks 0, 2-5`. Ranks are in ascending order; three or
    more consecutive ranks form a range.
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words = [
        f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans
    ]
    return f"rank{'s' if sum(map(len, spans)) > 1 else ''} {', '.join(words)}"


def _listed(ranks_by_text: Mapping[str, list[int]], rest: str) -> list[str]:
    """Return one item per text, such as `ranks 0, 2: waiting in …`. If there are too many texts,
    the last item lists all remaining ranks with the text `rest`.
    """
    groups = list(ranks_by_text.items())
    if len(groups) > _MAX_GROUPS:
        others = [rank for _, ranks in groups[_MAX_GROUPS - 1 :] for rank in ranks]
        groups = [*groups[: _MAX_GROUPS - 1], (rest, others)]
    return [f"{format_ranks(ranks)}: {text}" for text, ranks in groups]
