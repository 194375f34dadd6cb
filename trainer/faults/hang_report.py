"""The state of a rank, and the one-line description of a hang from the states of all ranks."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from trainer.faults.flight_recorder import Collective

# Only the first few groups of ranks are listed, so that the line stays readable.
_MAX_GROUPS = 4
_GONE = "not responding (stopped, exited or unreachable)"


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
        for name in ("newest", "pending"):
            fields[name] = fields[name] and Collective(**fields[name])
        return RankState(**fields)

    def __str__(self) -> str:
        phase = f" in {self.phase}" if self.phase else ""
        location = f" ({self.location})" if self.location else ""
        last = f", after {self.newest}" if self.newest else ""
        waiting = f"waiting in {self.pending} " if self.pending else ""
        return f"{waiting}at step {self.step}{phase}{location}{'' if waiting else last}"


def describe_hang(
    before: Mapping[int, RankState], after: Mapping[int, RankState], *, size: int
) -> str:
    """Return the description of a hang, given the states of all ranks at two points in time.

    A rank counts as unresponsive if its state is missing or if its beat did not increase in
    between. `size` is the world size.
    """
    silent, elsewhere, waiting = {}, {}, {}
    for rank in range(size):
        old, state = before.get(rank), after.get(rank)
        if state is None:
            silent[rank] = _GONE
        elif old is not None and state.beat <= old.beat:
            silent[rank] = f"{_GONE}, last seen {state}"
        elif state.pending is None:
            elsewhere[rank] = str(state)
        else:
            waiting[rank] = state
    if silent:
        fix = "check the machines and the network of the ranks that are not responding"
    elif elsewhere:
        fix = "if this work is slow but correct, raise train.timeout_seconds"
    elif len({state.pending for state in waiting.values()}) > 1:
        fix = (
            "check whether a rank skipped a collective or groups of ranks are waiting for each "
            "other"
        )
    else:
        fix = "check the network between the ranks, because all of them have entered the collective"
    parts = [
        *_by_text(silent, "not responding"),
        *_by_text(elsewhere, "at other locations"),
        *_by_text(_with_seconds(waiting), "waiting at other locations"),
    ]
    return f"{'; '.join(parts)}: {fix}"


def describe_lost_store(own: RankState, *, rank: int, host: str) -> str:
    """Return the description of a hang for a rank that cannot read the states of the other
    ranks.
    """
    return (
        f"{host}, which hosts the store of the process group, is not responding (stopped, exited "
        f"or unreachable); {format_ranks([rank])}: {_with_seconds({rank: own})[rank]}: check that "
        "machine and its network"
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


def _with_seconds(states: Mapping[int, RankState]) -> dict[int, str]:
    """Add the wait to each state: the longest one of all ranks at the same location."""
    longest: dict[str, float] = {}
    for state in states.values():
        longest[str(state)] = max(longest.get(str(state), 0.0), state.waited_seconds)
    return {rank: f"{state} for {longest[str(state)]:.0f} s" for rank, state in states.items()}


def _by_text(texts: Mapping[int, str], rest: str) -> list[str]:
    """Return one item per distinct text, such as `ranks 0, 2: waiting in …`. If there are too many
    texts, the last item lists all remaining ranks with the text `rest`.
    """
    by_text: dict[str, list[int]] = {}
    for rank in sorted(texts):
        text = texts[rank]
        by_text.setdefault(text, []).append(rank)
    groups = list(by_text.items())
    if len(groups) > _MAX_GROUPS:
        others = [rank for _, ranks in groups[_MAX_GROUPS - 1 :] for rank in ranks]
        groups = [*groups[: _MAX_GROUPS - 1], (rest, others)]
    return [f"{format_ranks(ranks)}: {text}" for text, ranks in groups]
