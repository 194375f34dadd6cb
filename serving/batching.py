"""Dynamic batching across requests: inputs that arrive while a batch runs form the next batch.

A batch runs in its own thread, so it does not block the event loop. This thread decodes the inputs,
runs the model and completes the requests, because each switch between threads costs about as much
CPU time as parsing a request.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from serving.limits import too_busy

T = TypeVar("T")


@dataclass(eq=False)
class _Request:
    """A request. The batch thread fills `rows`, one per input, and sets `value` or `error`."""

    complete: Callable[[Tensor], Any]
    result: asyncio.Future[Any]
    num_inputs: int
    rows: dict[int, Tensor] = field(default_factory=dict)
    value: Any = None
    error: Exception | None = None

    def resolve(self) -> None:
        """Pass the result to the waiting coroutine. Call this on the event loop."""
        if self.result.done():  # the client has disconnected
            return
        if self.error is not None:
            self.result.set_exception(self.error)
        else:
            self.result.set_result(self.value)


@dataclass(frozen=True, eq=False)
class _Input:
    """An input of a request. `prepared` is set if a helper thread prepares it."""

    request: _Request
    position: int
    prepare: Callable[[], Any]
    prepared: Future[Any] | None


class Batcher:
    """Groups inputs into batches. `forward` maps a batch of B prepared inputs to a tensor [B, ...].

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
        self._queue: deque[_Input] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forward")
        self._worker: asyncio.Task[None] | None = None
        self._started: float | None = None

    async def submit(
        self, inputs: Sequence[Callable[[], Any]], complete: Callable[[Tensor], T]
    ) -> T:
        """Queue inputs and return `complete(rows)`, where `rows` [len(inputs), ...] are the outputs
        of `forward`.

        Each input is a function that prepares it, such as decoding an image. Raises ApiError 429
        if the queue has no room for all of the inputs. Exceptions from these functions, `forward`
        and `complete` propagate.
        """
        if len(self._queue) + len(inputs) > self._max_queued:
            raise too_busy()
        loop = asyncio.get_running_loop()
        request = _Request(complete, loop.create_future(), len(inputs))
        helpers = None if self._started is None else self._helpers
        for i, prepare in enumerate(inputs):
            prepared = None if helpers is None else helpers.submit(prepare)
            self._queue.append(_Input(request, i, prepare, prepared))
        # The worker ends when the queue is empty, so an idle batcher has no running task.
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return await request.result  # canceled if the client disconnects

    def num_queued(self) -> int:
        """Return the number of inputs waiting for a batch, including those of clients that have
        disconnected."""
        return len(self._queue)

    def seconds_in_forward(self) -> float:
        """Return the seconds since the current batch started, or 0 when idle."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    async def _work(self) -> None:
        if self._wait_seconds and len(self._queue) < self._batch_size:
            await asyncio.sleep(self._wait_seconds)
        loop = asyncio.get_running_loop()
        while batch := self._next_batch():
            self._started = time.monotonic()
            try:
                finished = await loop.run_in_executor(self._thread, self._run, batch)
            finally:
                self._started = None
            for request in finished:
                request.resolve()

    def _next_batch(self) -> list[_Input]:
        """Remove a batch from the queue, without the inputs of failed or disconnected requests."""
        batch: list[_Input] = []
        while self._queue and len(batch) < self._batch_size:
            one = self._queue.popleft()
            if not one.request.result.done():
                batch.append(one)
            elif one.prepared is not None:
                one.prepared.cancel()
        return batch

    def _run(self, batch: Sequence[_Input]) -> list[_Request]:
        """Run a batch. Returns the requests that succeeded or failed, in the order of arrival. An
        exception fails only the requests that it affects."""
        ready: dict[_Input, Any] = {}
        for one in batch:
            if one.request.error is None:
                try:
                    ready[one] = one.prepare() if one.prepared is None else one.prepared.result()
                except Exception as error:
                    one.request.error = error
        ready = {one: prepared for one, prepared in ready.items() if one.request.error is None}
        try:
            rows = self._forward(list(ready.values())) if ready else ()
            for one, row in zip(ready, rows, strict=True):
                one.request.rows[one.position] = row
        except Exception as error:
            for one in ready:
                one.request.error = error
        finished = [
            request
            for request in dict.fromkeys(one.request for one in batch)
            if request.error is not None or len(request.rows) == request.num_inputs
        ]
        for request in finished:
            if request.error is None:
                try:
                    rows = torch.stack([request.rows[i] for i in range(request.num_inputs)])
                    request.value = request.complete(rows)
                except Exception as error:
                    request.error = error
        return finished
