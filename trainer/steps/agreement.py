"""What all ranks tell each other once a step, in one small exchange: who was asked to stop, who met
bad samples, how long each was busy."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from data.loading.batch import Batch
from heads.collectives import all_gather_equal, all_gather_rows
from trainer.process.signals import ASKS_TO_STOP
from trainer.world import World

_NAMES = (None, *(number.name for number in ASKS_TO_STOP))
CollectiveHook = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Agreed:
    """The same on every rank: the signal to stop for, if any rank received one; the bad samples
    that any rank replaced; and each rank's busy seconds."""

    stop: str | None
    bad: list[int]
    busy_seconds: list[float]


def agree(
    world: World, *, stop: str | None, batch: Batch | None = None, busy_seconds: float = 0.0
) -> Agreed:
    """Exchange this rank's part for everyone's (collective). It travels over the CPU's group, so
    that no device is waited for."""
    mine = [] if batch is None else [substitute.index for substitute in batch.substitutes]
    numbers = [_NAMES.index(stop), len(mine), busy_seconds]
    parts = all_gather_equal(torch.tensor(numbers, dtype=torch.float64), world.group)
    stops, counts, busy = torch.stack(parts).T.tolist()
    bad: list[int] = []
    if any(counts):
        rows = torch.tensor(mine, dtype=torch.int64)
        bad = all_gather_rows(rows, [int(count) for count in counts], world.group).tolist()
    return Agreed(_NAMES[int(max(stops))], bad, busy)


class BusyTimer:
    """Seconds that this rank did not spend waiting in collectives. `around` stands about each of
    them, within whatever else wants to."""

    def __init__(self, outer: CollectiveHook) -> None:
        self._outer = outer
        self._start, self._waited = time.perf_counter(), 0.0

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """A collective named `name`: for `heads.collectives.listening`."""
        begin = time.perf_counter()
        try:
            with self._outer(name):
                yield
        finally:
            self._waited += time.perf_counter() - begin

    def take(self) -> float:
        """Busy seconds since the last call."""
        now = time.perf_counter()
        busy = now - self._start - self._waited
        self._start, self._waited = now, 0.0
        return busy
