"""Dynamic batching across requests: requests that arrive while a batch runs form the next batch.

A batch runs in its own thread, so it does not block the event loop. This thread decodes the inputs,
runs the model and completes the requests, because each switch between threads costs about as much
CPU time as parsing a request.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from serving.limits import too_busy

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Request:
    """Functions that prepare the inputs of a request, and one that computes its result."""

    inputs: Sequence[Callable[[], Any]]
    complete: Callable[[Tensor], Any]
    result: asyncio.Future[Any]


class Batcher:
    """Groups requests into batches. `forward` maps at most `batch_size` prepared inputs to a tensor
    [B, ...].

    Use it from a single event loop. An idle batcher waits `wait_seconds` before it runs the first
    batch, unless that batch is already full. With `helpers`, inputs that arrive while a batch runs
    are prepared by these threads; all other inputs are prepared when their batch runs.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[Any]], Tensor],
        *,
        batch_size: int,
        wait_seconds: float,
        max_queued: int,
        helpers: Executor | None = None,
    ) -> None:
        self._forward, self._helpers = forward, helpers
        self._batch_size, self._wait_seconds = batch_size, wait_seconds
        self._max_queued = max_queued
        self._queue: deque[_Request] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forward")
        self._worker: asyncio.Task[None] | None = None
        self._started: float | None = None
        # Inputs waiting for a batch, including those of clients that have disconnected.
        self.num_queued = 0

    async def submit(
        self, inputs: Sequence[Callable[[], Any]], complete: Callable[[Tensor], T]
    ) -> T:
        """Queue inputs and return `complete(rows)`, where `rows` [len(inputs), ...] are the outputs
        of `forward`.

        Each input is a function that prepares it, such as decoding an image. Raises ApiError 429
        if the queue has no room for all of the inputs. Exceptions from these functions, `forward`
        and `complete` propagate.
        """
        if self.num_queued + len(inputs) > self._max_queued:
            raise too_busy()
        loop = asyncio.get_running_loop()
        if self._helpers is not None and self._started is not None:
            inputs = [self._helpers.submit(prepare).result for prepare in inputs]
        request = _Request(inputs, complete, loop.create_future())
        self._queue.append(request)
        self.num_queued += len(inputs)
        # The worker ends when the queue is empty, so an idle batcher has no running task.
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        result: T = await request.result  # canceled if the client disconnects
        return result

    def seconds_in_forward(self) -> float:
        """Return the seconds since the current batch started, or 0 when idle."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    async def _work(self) -> None:
        if self._wait_seconds and self.num_queued < self._batch_size:
            await asyncio.sleep(self._wait_seconds)
        loop = asyncio.get_running_loop()
        while batch := self._next_batch():
            self._started = time.monotonic()
            try:
                outcomes = await loop.run_in_executor(self._thread, self._run, batch)
            finally:
                self._started = None
            for request, (value, error) in zip(batch, outcomes, strict=True):
                if request.result.done():  # the client has disconnected
                    continue
                if error is None:
                    request.result.set_result(value)
                else:
                    request.result.set_exception(error)

    def _next_batch(self) -> list[_Request]:
        """Remove the requests of a batch from the queue, without those of disconnected clients. The
        last one may need more than one forward pass."""
        batch: list[_Request] = []
        count = 0
        while self._queue and count < self._batch_size:
            request = self._queue.popleft()
            self.num_queued -= len(request.inputs)
            if not request.result.done():
                batch.append(request)
                count += len(request.inputs)
        return batch

    def _run(self, batch: Sequence[_Request]) -> list[tuple[Any, Exception | None]]:
        """Return the value or the exception of each request. An exception fails only the requests
        that it affects."""
        prepared: dict[_Request, list[Any]] = {}
        outcomes: dict[_Request, tuple[Any, Exception | None]] = {}
        for request in batch:
            try:
                prepared[request] = [prepare() for prepare in request.inputs]
            except Exception as error:
                outcomes[request] = None, error
        inputs = [one for each in prepared.values() for one in each]
        try:
            parts = [
                self._forward(inputs[first : first + self._batch_size])
                for first in range(0, len(inputs), self._batch_size)
            ]
            counts = [len(each) for each in prepared.values()]
            rows = torch.cat(parts).split(counts) if parts else ()
        except Exception as error:
            return [outcomes.get(request, (None, error)) for request in batch]
        for request, own in zip(prepared, rows, strict=True):
            try:
                outcomes[request] = request.complete(own), None
            except Exception as error:
                outcomes[request] = None, error
        return [outcomes[request] for request in batch]
