"""Dynamic batching across requests: inputs that arrive during a forward pass form the next batch.

The forward pass runs in its own thread, so it does not block the event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class QueueFullError(Exception):
    """Raised if the model's queue has no room for the inputs."""


@dataclass(frozen=True)
class _Waiting:
    input: Any
    result: asyncio.Future[Tensor]


class Batcher:
    """Groups inputs into batches. `forward` maps a batch of B inputs to a tensor [B, ...].

    Use it from a single event loop. An idle batcher waits `wait_seconds` before it runs the first
    batch, unless that batch is already full.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[Any]], Tensor],
        *,
        batch_size: int,
        wait_seconds: float,
        max_queued: int,
    ) -> None:
        self._forward = forward
        self._batch_size, self._wait_seconds, self._max_queued = (
            batch_size,
            wait_seconds,
            max_queued,
        )
        self._queue: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forward")
        self._worker: asyncio.Task[None] | None = None
        self._started: float | None = None

    async def submit(self, inputs: Sequence[Any]) -> Tensor:
        """Queue inputs and return their rows of the output of `forward`, [len(inputs), ...].

        Raises QueueFullError if the queue has no room for all of the inputs. Exceptions from
        `forward` propagate.
        """
        if len(self._queue) + len(inputs) > self._max_queued:
            raise QueueFullError
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(one, loop.create_future()) for one in inputs]
        self._queue.extend(waiting)
        # The worker ends when the queue is empty, so an idle batcher has no running task.
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        try:
            return torch.stack(await asyncio.gather(*(one.result for one in waiting)))
        finally:
            for one in waiting:  # do not run the model for clients that have disconnected
                one.result.cancel()

    def num_queued(self) -> int:
        """Return the number of inputs waiting for a batch, including those of clients that have
        disconnected."""
        return len(self._queue)

    def seconds_in_forward(self) -> float:
        """Return the seconds since the current forward pass started, or 0 when idle."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    async def _work(self) -> None:
        if self._wait_seconds and len(self._queue) < self._batch_size:
            await asyncio.sleep(self._wait_seconds)
        while batch := self._next_batch():
            self._started = time.monotonic()
            try:
                rows = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._forward, [one.input for one in batch]
                )
            except Exception as error:  # fail only the requests in this batch
                for one in batch:
                    if not one.result.done():
                        one.result.set_exception(error)
            else:
                for one, row in zip(batch, rows, strict=True):
                    if not one.result.done():
                        one.result.set_result(row)
            finally:
                self._started = None

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._queue and len(batch) < self._batch_size:
            one = self._queue.popleft()
            if not one.result.done():
                batch.append(one)
        return batch
