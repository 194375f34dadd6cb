"""Exchanges stop signals, replaced samples and busy times between all ranks once per step.

The exchange takes a few network round trips. It runs in a thread while the main thread computes the
step, on separate process groups. The result is known at the end of the step:

    main thread     load batch t | compute step t      | end of step t: record it, or save and stop
    exchange                     | signals, samples  t |
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from data.loading.batch import Batch
from heads.collectives import hooked
from trainer.process.signals import STOP_SIGNALS
from trainer.world import World

_NAMES = (None, *(number.name for number in STOP_SIGNALS))


@dataclass(frozen=True)
class Agreed:
    """The result of the exchange, the same on every rank.

    `stop` is the name of the stop signal, if any rank received one. `bad` contains the indices of
    the bad samples that the ranks replaced, and `busy_seconds` contains one number per rank.
    """

    stop: str | None
    bad: list[int]
    busy_seconds: list[float]


def agree(
    world: World, *, stop: str | None, batch: Batch | None = None, busy_seconds: float = 0.0
) -> Agreed:
    """Share this rank's values with all ranks and wait for those of the others (collective). Uses
    CPU tensors and gloo, so it does not wait for the device."""
    mine = [] if batch is None else [substitute.index for substitute in batch.substitutes]
    numbers = [_NAMES.index(stop), len(mine), busy_seconds]
    parts = world.all_gather_small(torch.tensor(numbers, dtype=torch.float64))
    stops, counts, busy = torch.stack(parts).T.tolist()
    bad: list[int] = []
    if any(counts):
        padded = torch.tensor(mine + [0] * int(max(counts) - len(mine)))
        lists = [part.tolist() for part in world.all_gather_small(padded)]
        bad = [i for one, count in zip(lists, counts, strict=True) for i in one[: int(count)]]
    return Agreed(_NAMES[int(max(stops))], bad, busy)


class Agreement:
    """Runs `agree` in the background, one call at a time, in the same order on all ranks."""

    def __init__(self, world: World) -> None:
        assert world.size == 1 or world.grid is not None, "the exchange needs its own groups"
        self._world = world
        self._thread = ThreadPoolExecutor(1, "agreement")

    def start(self, *, stop: str | None, batch: Batch, busy_seconds: float) -> Callable[[], Agreed]:
        """Start an exchange. Return a function that waits for its result (collective)."""
        future = self._thread.submit(
            agree, self._world, stop=stop, batch=batch, busy_seconds=busy_seconds
        )

        def wait() -> Agreed:
            with hooked("agreement"):
                return future.result()

        return wait

    def close(self) -> None:
        """Stop the thread. After an error, an exchange may still wait for another rank."""
        self._thread.shutdown(wait=False, cancel_futures=True)
