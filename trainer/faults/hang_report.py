"""The state of a rank, and the one-line description of a hang from the states of all ranks."""

import json
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from trainer.faults.flight_recorder import Collective

_LIBRARIES = ("torch", "deepspeed", "contextlib")
# Only the first few groups of ranks are listed, so that the line stays readable.
_MAX_GROUPS = 4


@dataclass(frozen=True)
class RankState:
    """The state of a rank. `beat` increases while the rank is alive. `waited_seconds` is how long
    the rank has been waiting in `pending`.

    `location` is the line that the main thread is executing: `module:line`.
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
        fields["newest"] = _collective(fields["newest"])
        fields["pending"] = _collective(fields["pending"])
        return RankState(**fields)


def _collective(fields: dict[str, Any] | None) -> Collective | None:
    return None if fields is None else Collective(**fields)


def main_thread_location() -> str:
    """Return the innermost line of the main thread outside the libraries and this package, as
    `module:line`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None and _is_library(frame):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_globals.get('__name__', '?')}:{frame.f_lineno}"


def _is_library(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in _LIBRARIES or module.startswith(__package__)


def describe_hang(
    before: Mapping[int, RankState], after: Mapping[int, RankState], *, size: int
) -> str:
    """Return the description of a hang, given the states of all ranks at two points in time.

    A rank counts as unresponsive if its state is missing or if its beat did not increase in
    between. `size` is the world size.
    """
    silent = [rank for rank in range(size) if not _is_alive(before.get(rank), after.get(rank))]
    responding = {rank: state for rank, state in after.items() if rank not in silent}
    waiting = {rank: state for rank, state in responding.items() if state.pending}
    elsewhere = {rank: state for rank, state in responding.items() if not state.pending}
    last_seen = {rank: _last_seen(after.get(rank)) for rank in silent}
    parts = [
        *_group_ranks(
            last_seen, "is not responding", "are not responding", "(last seen elsewhere)"
        ),
        *_group_ranks(
            {rank: _describe_state(state) for rank, state in elsewhere.items()}, "is", "are"
        ),
        *_describe_waits(waiting),
    ]
    return f"{'; '.join(parts)}: {_suggestion(silent, elsewhere, waiting)}"


def describe_lost_store(own: RankState, *, rank: int, host: str) -> str:
    """Return the description of a hang for a rank that cannot read the states of the other
    ranks.
    """
    return (
        f"{host}, which hosts the store of the process group, is not responding (stopped, exited "
        f"or unreachable); {_describe_waits({rank: own})[0]}: check that machine and its network"
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text: `rank 3`, or `ranks 0, 2-5`. Ranks are in ascending order; three or
    more consecutive ranks form a range.
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [
        str(first) if first == last else f"{first}{', ' if last == first + 1 else '-'}{last}"
        for first, last in spans
    ]
    several = len(spans) > 1 or spans[0][0] != spans[0][1]
    return f"rank{'s' if several else ''} {', '.join(words)}"


def _is_alive(before: RankState | None, after: RankState | None) -> bool:
    return after is not None and (before is None or after.beat > before.beat)


def _last_seen(state: RankState | None) -> str:
    if state is None:
        return "(stopped, exited or unreachable)"
    return f"(stopped, exited or unreachable; last seen {_describe_state(state)})"


def _describe_state(state: RankState) -> str:
    phase = f" in {state.phase}" if state.phase else ""
    location = f" ({state.location})" if state.location else ""
    relation = "after" if state.pending is None else "waiting in"
    collective = state.pending or state.newest
    return f"at step {state.step}{phase}{location}" + (
        f", {relation} {collective}" if collective else ""
    )


def _describe_waits(states: Mapping[int, RankState]) -> list[str]:
    """Group the ranks that wait in the same collective, and give the longest wait of each group."""
    longest: dict[str, float] = {}
    waits = {rank: _describe_wait(state) for rank, state in states.items()}
    for rank, wait in waits.items():
        longest[wait] = max(longest.get(wait, 0.0), states[rank].waited_seconds)
    return _group_ranks(
        {rank: f"{wait} for {longest[wait]:.0f} s" for rank, wait in waits.items()},
        "has been waiting",
        "have been waiting",
    )


def _describe_wait(state: RankState) -> str:
    phase = f" of {state.phase}" if state.phase else ""
    location = f" ({state.location})" if state.location else ""
    return f"in {state.pending}{phase} at step {state.step}{location}"


def _group_ranks(
    texts: Mapping[int, str], singular: str, plural: str, rest: str = "at other locations"
) -> list[str]:
    """Return one item per distinct text, such as `ranks 0, 2 have been waiting in …`. If there are
    too many texts, the last item lists all remaining ranks with the text `rest`.
    """
    by_text: dict[str, list[int]] = {}
    for rank in sorted(texts):
        by_text.setdefault(texts[rank], []).append(rank)
    groups = list(by_text.items())
    if len(groups) > _MAX_GROUPS:
        others = [rank for _, ranks in groups[_MAX_GROUPS - 1 :] for rank in ranks]
        groups = [*groups[: _MAX_GROUPS - 1], (rest, others)]
    return [
        f"{format_ranks(ranks)} {singular if len(ranks) == 1 else plural} {text}"
        for text, ranks in groups
    ]


def _suggestion(
    silent: Sequence[int], elsewhere: Mapping[int, RankState], waiting: Mapping[int, RankState]
) -> str:
    if silent:
        return "check the machines and the network of the ranks that are not responding"
    if elsewhere:
        return "if this work is slow but correct, raise train.timeout_seconds"
    if len({state.pending for state in waiting.values()}) > 1:
        return (
            "check whether a rank skipped a collective or groups of ranks are waiting for each "
            "other"
        )
    return "check the network between the ranks, because all of them have entered the collective"
