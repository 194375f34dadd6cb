"""Where a step's time goes: seconds by phase, measured as the step's own device lives them.

A phase inside another takes its time out of the outer one's, so that the sums never count twice.
Evaluations and checkpoints keep what is inside them: they are no part of a step. One thread uses a
`Phases`; others may read `current`, `counted` and `operation`.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol, get_args

import torch

Phase = Literal[
    "data",
    "forward",
    "head",
    "backward",
    "optimizer",
    "communication",
    "checkpoint",
    "evaluation",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
NOT_OF_A_STEP: tuple[Phase, ...] = ("checkpoint", "evaluation")

# Some steps' worth; those that the stream has passed are summed up and dropped.
_MANY_EVENTS = 1000


class Phases:
    """`with phases("forward"): …` counts the time inside; `take` gives it away.

    On CUDA the times are those of the stream, waits for the host included: events stand in it and
    are read later, so that no step synchronises. Elsewhere they are the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self.current: Phase | None = None
        self.operation: str | None = None  # the collective that this process is in
        self.counted: Phase | None = None  # the phase that the time goes to
        self._timeline: _Timeline = (
            _StreamTimeline(device) if device.type == "cuda" else _HostTimeline()
        )

    @contextmanager
    def __call__(self, name: Phase) -> Iterator[None]:
        assert name in PHASES, name
        outer, counted = self.current, self.counted
        self._enter(name, counted if counted in NOT_OF_A_STEP else name)
        try:
            yield
        finally:
            self._enter(outer, counted)

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """A collective named `name`: for `heads.collectives.listening`."""
        with self("communication"):
            self.operation = name
            try:
                yield
            finally:
                self.operation = None

    def take(self) -> dict[Phase, float]:
        """Seconds by phase since the last call, of the phases that there were.

        On CUDA what the stream has not reached yet is left to the next call.
        """
        self._timeline.switch(self.counted)
        return self._timeline.take()

    def _enter(self, current: Phase | None, counted: Phase | None) -> None:
        self.current, self.counted = current, counted
        self._timeline.switch(counted)


class _Timeline(Protocol):
    def switch(self, name: Phase | None) -> None:
        """The time from here on belongs to `name`."""

    def take(self) -> dict[Phase, float]: ...


class _HostTimeline:
    def __init__(self) -> None:
        self._seconds: dict[Phase, float] = defaultdict(float)
        self._name: Phase | None = None
        self._since = 0.0

    def switch(self, name: Phase | None) -> None:
        now = time.perf_counter()
        if self._name is not None:
            self._seconds[self._name] += now - self._since
        self._name, self._since = name, now

    def take(self) -> dict[Phase, float]:
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken


class _StreamTimeline:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[Phase, float] = defaultdict(float)
        self._pieces: deque[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._name: Phase | None = None
        self._since = self._event()

    def switch(self, name: Phase | None) -> None:
        now = self._event()
        if self._name is not None:
            self._pieces.append((self._name, self._since, now))
        self._name, self._since = name, now
        if len(self._pieces) > _MANY_EVENTS:
            self._sum_up()

    def take(self) -> dict[Phase, float]:
        self._sum_up()
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def _sum_up(self) -> None:
        """Of the events that the stream has passed."""
        while self._pieces and self._pieces[0][2].query():
            name, start, end = self._pieces.popleft()
            self._seconds[name] += start.elapsed_time(end) / 1000

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
