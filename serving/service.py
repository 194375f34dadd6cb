"""Request processing in one replica: admission, decoding, batching, answers and metrics.

HTTP routes are in `serving/http/`; the deployment of replicas is in `serving/deploy/`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from starlette.requests import ClientDisconnect
from threadpoolctl import threadpool_limits
from torch import Tensor

from serving.answer import Query, answer, make_query
from serving.api_error import RETRY, ApiError, too_many_requests
from serving.batching import Batcher, QueueFullError
from serving.config import ServingConfig
from serving.drift import DriftMonitor
from serving.limits import Uploads
from serving.model import Model
from serving.query_log import QueryLog
from serving.schemas import Answer, ClassDrift, Classification, InputClasses, TopClass
from serving.top_classes import MAX_TOP, top_classes

T = TypeVar("T")
# A forward pass that takes longer than this is considered hung. A faulty driver can be the cause.
_HUNG_SECONDS = 120.0
# JSON of up to this size parses in about 1 ms, regardless of its contents. Parsing it in a thread
# would hold the GIL just as long.
_SHORT_BYTES = 2**14
# So does JSON of up to this size if almost all of it is base64 in a few strings.
_BASE64_BYTES, _BASE64_MARKS = 2**18, 200
# Looking up a class takes about 5 us.
_FEW_CLASSES = 16
# If the model's queue is full, a stream waits this long before it tries again to queue an input.
_QUEUE_SECONDS = 0.02


class Counts(Protocol):
    """Counts finished requests."""

    def count(self, *, outcome: str, inputs: int, seconds: float | None) -> None: ...


class Slots:
    """Limits the number of requests that a replica processes concurrently."""

    def __init__(self, limit: int) -> None:
        self._limit, self.in_use = limit, 0

    def check(self) -> None:
        """Raise ApiError 429 if no slot is free."""
        if self.in_use >= self._limit:
            raise too_many_requests()

    def acquire(self) -> None:
        self.check()
        self.in_use += 1

    def release(self) -> None:
        self.in_use -= 1


class InProgress:
    """A request in progress. `inputs` is the number of its inputs answered so far."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.has_slot = False
        self.inputs = 0

    def acquire_slot(self) -> None:
        """Acquire a slot and hold it until the request ends. Call this after the body has been
        received, because slow uploads must not occupy a slot. Raises ApiError 429 if no slot is
        free."""
        self._slots.acquire()
        self.has_slot = True

    def release_slot(self) -> None:
        if self.has_slot:
            self._slots.release()


class Service:
    """A model that answers requests within the limits of `config`. Use it from a single event
    loop."""

    def __init__(self, model: Model, config: ServingConfig, counts: Counts) -> None:
        """The service is ready once the constructor returns. Raises ValueError if the model fails
        its self-check."""
        threads = config.threads_per_replica
        torch.set_num_threads(threads)
        threadpool_limits(threads)  # numpy uses these threads to search galleries
        self.model, self.config = model, config
        self.uploads = Uploads(config)
        self._counts = counts
        self._slots = Slots(config.max_requests)
        self._helpers = ThreadPoolExecutor(max(2, threads), "prepare")
        has_idle_cores = threads > 1 or config.device != "cpu"
        self._batcher = Batcher(
            model.features,
            batch_size=max(1, config.batch_size // model.crops),
            wait_seconds=config.batch_wait_seconds,
            max_queued=config.max_queued_inputs,
            helpers=self._helpers if has_idle_cores else None,
        )
        # Computing all scores can take a second, so it has its own thread. Requests that arrive in
        # the meantime share the next pass over the class weights.
        self._ranker = Batcher(
            self._rank,
            batch_size=config.batch_size,
            wait_seconds=0,
            max_queued=config.max_queued_inputs,
        )
        model.self_check()
        self._query_log = None if config.query_log is None else QueryLog(config.query_log)
        self.drift: DriftMonitor | None = None
        if config.drift_period is not None:
            self.drift = DriftMonitor(config.drift_period, self._log_period)

    def close(self) -> None:
        """Close the query log."""
        if self._query_log is not None:
            self._query_log.close()

    def check_health(self) -> None:
        """Raise RuntimeError if a forward pass has hung. A full queue does not make a replica
        unhealthy."""
        if self._batcher.seconds_in_forward() > _HUNG_SECONDS:
            raise RuntimeError(
                f"a forward pass has been running for more than {_HUNG_SECONDS:.0f} s"
            )

    def load(self) -> tuple[int, int]:
        """Return the number of requests in progress and the number of inputs waiting for the
        model."""
        return self._slots.in_use, self._batcher.num_queued()

    def num_monitored(self) -> tuple[int, int]:
        """Return how many classes are monitored for drift, and how many of them have drifted."""
        return (0, 0) if self.drift is None else self.drift.num_monitored()

    @asynccontextmanager
    async def admitted(self, *, is_timed: bool = True) -> AsyncIterator[InProgress]:
        """Admit a request for the duration of the context, then count it by its outcome.

        Inside the context, read the body, then call `acquire_slot`. Raises ApiError: 429 if too
        many requests are in progress or waiting for the model; after the timeout, 408 if the
        request has not acquired a slot yet and 503 if it has. Streams pass `is_timed=False` and
        have no timeout.
        """
        started, outcome = time.perf_counter(), "internal"
        progress = InProgress(self._slots)
        try:
            async with self._within_limits(progress, is_timed=is_timed):
                yield progress
            outcome = "ok"
        except ApiError as error:
            outcome = error.code
            raise
        except (ClientDisconnect, asyncio.CancelledError):
            outcome = "client_left"
            raise
        finally:
            # The client decides how long a stream lasts, so its duration is not a latency of this
            # server.
            seconds = time.perf_counter() - started if is_timed else None
            self._counts.count(outcome=outcome, inputs=progress.inputs, seconds=seconds)

    @asynccontextmanager
    async def _within_limits(self, progress: InProgress, *, is_timed: bool) -> AsyncIterator[None]:
        self._slots.check()  # reject before reading the body
        seconds = self.config.request_timeout_seconds
        try:
            async with asyncio.timeout(seconds if is_timed else None):
                yield
        except TimeoutError as error:
            if progress.has_slot:
                message = f"no response within {seconds:g} s. Try again"
                raise ApiError(503, "timeout", message, RETRY) from error
            message = f"the body did not arrive within {seconds:g} s. Send it faster"
            raise ApiError(408, "slow_body", message) from error
        except QueueFullError as error:
            raise too_many_requests() from error
        finally:
            progress.release_slot()

    async def make_query(
        self, classes: Sequence[str | int], recall: float | None, threshold: float | None
    ) -> Query:
        """Create a query from class names or ids. Raises ApiError if it is invalid."""
        names = self.model.bundle.names
        if len(classes) <= _FEW_CLASSES and all(map(names.contains, classes)):
            return self._make_query(classes, recall, threshold)
        # The error message for an unknown class lists similar names, which takes up to a second.
        return await self.in_thread(self._make_query, classes, recall, threshold)

    async def computed(
        self,
        inputs: Sequence[bytes | str],
        complete: Callable[[Tensor], T],
        field: str | None = None,
    ) -> T:
        """Return `complete(features)` for the features [n, dim] of images (bytes) or texts, which
        are batched with those of other requests. `complete` runs in the model's thread.

        Raises ApiError for an input that cannot be decoded, and QueueFullError if the model's queue
        is full. The message of the ApiError names the input by `field` and its index.
        """
        prepare = [partial(self._prepare, i, raw, field) for i, raw in enumerate(inputs)]
        return await self._batcher.submit(prepare, complete)

    async def answer(self, inputs: Sequence[bytes | str], query: Query) -> Answer:
        """Compute the verdicts for each input. Raises the same exceptions as `computed`."""
        bundle = self.model.bundle
        found = await self.computed(inputs, lambda features: answer(bundle, features, query))
        self._observe(found)
        return found

    async def classify(self, inputs: Sequence[bytes | str], top: int) -> Classification:
        """Find the `top` classes with the largest scores of each input. Raises the same exceptions
        as `computed`."""
        features = await self.computed(inputs, lambda features: features)
        rows = [partial(features.__getitem__, i) for i in range(len(features))]
        return await self._ranker.submit(rows, partial(self._classification, top=top))

    def _rank(self, features: Sequence[Tensor]) -> Tensor:
        """Return the scores and class ids [B, MAX_TOP or all classes, 2]. Float64 represents both
        exactly."""
        scores, ids = top_classes(self.model.bundle, torch.stack(list(features)), MAX_TOP)
        return torch.stack([scores.double(), ids.double()], dim=-1)

    def _classification(self, ranked: Tensor, *, top: int) -> Classification:
        names = self.model.bundle.names.names
        return Classification(
            results=[
                InputClasses(
                    input=position,
                    classes=[
                        TopClass(class_name=names[int(id_)], class_id=int(id_), score=score)
                        for score, id_ in pairs
                    ],
                )
                for position, pairs in enumerate(ranked[:, :top].tolist())
            ]
        )

    def _observe(self, found: Answer) -> None:
        if self.drift is not None:
            self.drift.add_answer(found)
        if self._query_log is not None:
            self._query_log.add_answer(found)

    def _log_period(self, drift: ClassDrift) -> None:
        if self._query_log is not None:
            self._query_log.add_period(drift)

    async def when_queue_has_room(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`, retrying it as long as it raises QueueFullError.

        Streams use this because they wait instead of failing. Raises ApiError 503 after the request
        timeout.
        """
        seconds = self.config.request_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        return await attempt()
                    except QueueFullError:
                        await asyncio.sleep(_QUEUE_SECONDS)
        except TimeoutError as error:
            raise ApiError(
                503, "timeout", f"no response within {seconds:g} s. Try again"
            ) from error

    async def in_thread(self, function: Any, *arguments: Any) -> Any:
        """Run a blocking function in this replica's thread pool, not on the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._helpers, function, *arguments)

    async def parsed(self, function: Any, raw: bytes, *arguments: Any) -> Any:
        """Return `function(raw, …)`. JSON that parses in about 1 ms is parsed on the event loop,
        because a thread switch costs more than most of it; other JSON is parsed in a thread."""
        if len(raw) <= _SHORT_BYTES or _is_mostly_base64(raw):
            return function(raw, *arguments)
        return await self.in_thread(function, raw, *arguments)

    def _make_query(
        self, classes: Sequence[str | int], recall: float | None, threshold: float | None
    ) -> Query:
        try:
            class_ids = [self.model.bundle.class_id(name_or_id) for name_or_id in classes]
        except ValueError as error:
            raise ApiError(404, "unknown_class", str(error)) from error
        try:
            return make_query(self.model.bundle, class_ids, recall=recall, threshold=threshold)
        except ValueError as error:
            raise ApiError(422, "invalid_query", str(error)) from error

    def _prepare(self, position: int, raw: bytes | str, field: str | None) -> Any:
        try:
            return self.model.prepare(raw)
        except ValueError as error:
            code, default_field = (
                ("not_a_picture", "images") if isinstance(raw, bytes) else ("not_a_text", "texts")
            )
            raise ApiError(400, code, f"{field or default_field}[{position}]: {error}") from error

    def search(self, text: str, *, limit: int, offset: int) -> tuple[Sequence[int], int]:
        """Return one page of the ids of the classes whose names contain `text`, and the total
        number of such classes."""
        return self.model.bundle.names.search(text, limit=limit, offset=offset)


def _is_mostly_base64(raw: bytes) -> bool:
    """Return whether JSON has few values and escapes."""
    return len(raw) <= _BASE64_BYTES and sum(map(raw.count, b'"\\,{[')) <= _BASE64_MARKS
