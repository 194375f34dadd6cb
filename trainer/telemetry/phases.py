"""The time per phase of a step, in seconds, measured on the device that runs the step.

The time of a nested phase is not added to the outer phase, so that no time is counted twice.
Evaluations and checkpoints are exceptions: they include the phases inside them, because they are
not part of a step. Use a `Phases` object from only one thread; other threads may read `current`.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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

# The number of times that are kept, enough for several steps. If there are more, those that the
# stream has passed are summed and dropped.
_MAX_UNREAD = 1000


class Phases:
    """`with phases("forward"): …` measures the time inside the block; `take` returns and resets the
    sums. `take_busy` returns the time during which this rank did not wait for others.

    On CUDA, times are measured on the stream and include waits for the host. The measurements use
    CUDA events that are read later, so that a step does not synchronize with the device. On CPUs,
    they are host times. `current` is the phase to which the time is added.
    """

    def __init__(self, device: torch.device) -> None:
        self.current: Phase | None = None
        self._device = device
        self._seconds: dict[Phase, float] = defaultdict(float)
        self._busy_seconds = 0.0
        self._pieces: deque[tuple[Phase | None, Any, Any]] = deque()
        self._since = self._now()

    @contextmanager
    def __call__(self, name: Phase) -> Iterator[None]:
        assert name in PHASES, name
        outer = self.current
        self._switch(outer if outer in OUTSIDE_STEPS else name)
        try:
            yield
        finally:
            self._switch(outer)

    def collective(self, name: str) -> AbstractContextManager[None]:
        """Measure a collective. This is a hook for `heads.collectives.collective_hook`."""
        del name
        return self("communication")

    def take(self) -> dict[Phase, float]:
        """Return the seconds by phase since the last call. Phases that did not occur are
        omitted.

        On CUDA, events that the stream has not reached yet are included in the next call.
        """
        self._switch(self.current)
        self._sum_up()
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def take_busy(self) -> float:
        """Return the seconds since the last call during which this rank did not wait for others:
        the time outside collectives, backward, the update, evaluations and checkpoints.

        A slow rank is also slow in the parts of a step that are not excluded. On CUDA, the result
        covers about one step, but not the same one on each rank, because events that the stream has
        not reached yet are included in the next call.
        """
        self._switch(self.current)
        self._sum_up()
        taken, self._busy_seconds = self._busy_seconds, 0.0
        return taken

    def _switch(self, name: Phase | None) -> None:
        """Start adding time to the phase `name`, or to None outside of phases."""
        now = self._now()
        self._pieces.append((self.current, self._since, now))
        self.current, self._since = name, now
        if len(self._pieces) > _MAX_UNREAD:
            self._sum_up()

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _sum_up(self) -> None:
        """Sum the times up to now, or up to the last event that the stream has passed."""
        on_cuda = self._device.type == "cuda"
        while self._pieces and not (on_cuda and not self._pieces[0][2].query()):
            name, start, end = self._pieces.popleft()
            seconds = start.elapsed_time(end) / 1000 if on_cuda else end - start
            if name is not None:
                self._seconds[name] += seconds
            if name not in _NOT_BUSY:
                self._busy_seconds += seconds
