"""Exchanges stop signals, replaced samples and busy times between all ranks once per step.

The exchange takes several network round trips. It runs in a thread while the main thread computes
the step, on a separate process group. The result is known at the end of the step:

    main thread   load batch t | compute step t                 | record step t, or save and stop
    exchange                   | signals, samples t | watch the next rank |

After the exchange, the thread watches the connection to the next rank until that rank ends its
step. If a rank is lost, the collectives of other ranks may never end on their devices, but gloo
reports the closed connection at once. The rank that detects it exits, so the previous rank detects
the exit of that rank, and so on.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from data.loading.batch import Batch
from heads.collectives import all_gather_equal, all_gather_rows, hooked
from trainer.process.signals import STOP_SIGNALS
from trainer.world import World

_NO_LIMIT = timedelta(days=365)
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
    CPU tensors and gloo, so it does not wait for the device.

    gloo passes a message around a ring of all ranks, which takes some tens of milliseconds for 512
    ranks.
    """
    mine = [] if batch is None else [substitute.index for substitute in batch.substitutes]
    numbers = [_NAMES.index(stop), len(mine), busy_seconds]
    group = world.agreement_group
    parts = all_gather_equal(torch.tensor(numbers, dtype=torch.float64), group)
    stops, counts, busy = torch.stack(parts).T.tolist()
    bad: list[int] = []
    if any(counts):
        own = torch.tensor(mine, dtype=torch.int64)
        bad = all_gather_rows(own, [int(count) for count in counts], group).tolist()
    return Agreed(_NAMES[int(max(stops))], bad, busy)


class Agreement:
    """Runs `agree` in the background, one call at a time, in the same order on all ranks.

    Leaving the context without an error waits for the thread, which uses the process groups, and
    until the last message is sent.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._thread = ThreadPoolExecutor(1, "agreement")
        self._running: tuple[Future[Any], ...] = ()
        # gloo never sends a message whose Work no longer exists. The previous rank receives the
        # message of a step before it takes part in the next exchange.
        self._sent: dist.Work | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error, the thread and the last message may still wait for another rank. Without
        # one, the thread may not have started to receive yet, and the next rank waits for that.
        self._thread.shutdown(wait=error is None, cancel_futures=error is not None)
        if error is None and self._sent is not None:
            self._sent.wait()

    def start(self, *, stop: str | None, batch: Batch, busy_seconds: float) -> Callable[[], Agreed]:
        """Start an exchange. Return a function that waits for its result and ends the step
        (collective)."""
        world = self._world
        exchange = self._thread.submit(
            agree, world, stop=stop, batch=batch, busy_seconds=busy_seconds
        )
        self._running = (exchange, self._thread.submit(self._watch_next))

        def wait() -> Agreed:
            with hooked("agreement"):
                agreed = exchange.result()
            if world.size > 1:
                self._sent = dist.isend(torch.zeros(1), dst=(world.rank - 1) % world.size)
            return agreed

        return wait

    def _watch_next(self) -> None:
        """Wait until the next rank, in a ring of all ranks, ends its step. Raises gloo's
        RuntimeError as soon as the connection to that rank is closed.

        There is no time limit, because a step may take any amount of time, for example to compile.
        """
        world = self._world
        if world.size > 1:
            received = dist.irecv(torch.empty(1), src=(world.rank + 1) % world.size)
            assert received is not None
            received.wait(_NO_LIMIT)

    def check(self) -> None:
        """Raise gloo's error if the exchange or the watch of this step has failed. Does not
        wait."""
        for future in self._running:
            if future.done():
                future.result()
