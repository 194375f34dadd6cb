"""The time per phase of a step, in seconds, measured on the device that runs the step.

The time of a nested phase is not added to the outer phase, so that no time is counted twice.
Evaluations and checkpoints are exceptions: they include the phases inside them, because they are
not part of a step. Use a `Phases` object from only one thread; other threads may read `current`,
`counted` and `operation`.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

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
OUTSIDE_STEPS: tuple[Phase, ...] = ("checkpoint", "evaluation")
# The phases that `take_busy` excludes. DDP and FSDP sum gradients in the backward pass, and
# DeepSpeed sums them in the update, so these phases include waits for other ranks.
_NOT_BUSY: tuple[Phase, ...] = ("backward", "optimizer", "communication", *OUTSIDE_STEPS)

# The number of events kept, enough for several steps. If there are more, events that the stream has
# passed are summed and dropped.
_MAX_UNREAD_EVENTS = 1000


class Phases:
    """`with phases("forward"): …` measures the time inside the block; `take` returns and resets the
    sums. `take_busy` returns the time during which this rank did not wait for others.

    On CUDA, times are measured on the stream and include waits for the host. The measurements use
    CUDA events that are read later, so that a step does not synchronize with the device. On CPUs,
    they are host times.
    """

    def __init__(self, device: torch.device) -> None:
        self.current: Phase | None = None
        self.operation: str | None = None  # the collective that this process is running
        self.counted: Phase | None = None  # the phase to which the time is added
        self._timeline = _StreamTimeline(device) if device.type == "cuda" else _HostTimeline()
        self._seconds: dict[Phase, float] = defaultdict(float)
        self._busy_seconds = 0.0

    @contextmanager
    def __call__(self, name: Phase) -> Iterator[None]:
        assert name in PHASES, name
        outer, counted = self.current, self.counted
        self.current, self.counted = name, counted if counted in OUTSIDE_STEPS else name
        self._timeline.switch(self.counted)
        try:
            yield
        finally:
            self.current, self.counted = outer, counted
            self._timeline.switch(counted)

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Measure the collective `name`. This is a hook for `heads.collectives.collective_hook`."""
        with self("communication"):
            self.operation = name
            try:
                yield
            finally:
                self.operation = None

    def take(self) -> dict[Phase, float]:
        """Return the seconds by phase since the last call. Phases that did not occur are
        omitted.

        On CUDA, events that the stream has not reached yet are included in the next call.
        """
        self._add_measured()
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def take_busy(self) -> float:
        """Return the seconds since the last call during which this rank did not wait for others:
        the time outside collectives, backward, the update, evaluations and checkpoints.

        A slow rank is also slow in the parts of a step that are not excluded. On CUDA, the result
        covers about one step, but not the same one on each rank, because events that the stream has
        not reached yet are included in the next call.
        """
        self._add_measured()
        taken, self._busy_seconds = self._busy_seconds, 0.0
        return taken

    def _add_measured(self) -> None:
        self._timeline.switch(self.counted)
        for name, seconds in self._timeline.take().items():
            if name is not None:
                self._seconds[name] += seconds
            if name not in _NOT_BUSY:
                self._busy_seconds += seconds


class _HostTimeline:
    """The seconds per phase, measured with the clock of the host."""

    def __init__(self) -> None:
        self._seconds: dict[Phase | None, float] = defaultdict(float)
        self._name: Phase | None = None
        self._since: Any = self._now()

    def switch(self, name: Phase | None) -> None:
        """Start adding time to the phase `name`, or to None outside of phases."""
        now = self._now()
        self._add(self._name, self._since, now)
        self._name, self._since = name, now

    def take(self) -> dict[Phase | None, float]:
        """Return the measured seconds since the last call."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def _now(self) -> Any:
        return time.perf_counter()

    def _add(self, name: Phase | None, start: Any, end: Any) -> None:
        self._seconds[name] += end - start


class _StreamTimeline(_HostTimeline):
    """The seconds per phase, measured with events on the stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: deque[tuple[Phase | None, torch.cuda.Event, torch.cuda.Event]] = deque()
        super().__init__()

    def take(self) -> dict[Phase | None, float]:
        self._sum_up()
        return super().take()

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _add(self, name: Phase | None, start: Any, end: Any) -> None:
        self._pieces.append((name, start, end))
        if len(self._pieces) > _MAX_UNREAD_EVENTS:
            self._sum_up()

    def _sum_up(self) -> None:
        """Sum the times between events that the stream has passed."""
        while self._pieces and self._pieces[0][2].query():
            name, start, end = self._pieces.popleft()
            self._seconds[name] += start.elapsed_time(end) / 1000
