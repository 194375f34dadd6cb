"""Request processing in one replica: admission, decoding, batching, answers and metrics.

HTTP routes are in `serving/http/`; `serving/replica.py` opens a replica.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from starlette.requests import ClientDisconnect
from threadpoolctl import threadpool_limits
from torch import Tensor

from serving.answer import Query, Rule, answer, classification, make_query, ranked
from serving.api_error import RETRY, ApiError
from serving.batching import Batcher
from serving.config import ServingConfig
from serving.limits import ClientLimit, too_busy
from serving.metrics import Metrics
from serving.model import Model
from serving.schemas import Answer, Classification

T = TypeVar("T")
# A forward pass that takes longer than this is considered hung. A faulty driver can be the cause.
HUNG_SECONDS = 120.0
# JSON of up to this size parses in a few ms. A thread would hold the GIL just as long.
_SHORT_BYTES = 2**18
# Looking up a class takes about 5 us.
_FEW_CLASSES = 16


class InProgress(ExitStack):
    """A request in progress. `inputs` is the number of its inputs answered so far."""

    def __init__(self, slots: ClientLimit, client: str) -> None:
        super().__init__()
        self._slots, self._client = slots, client
        self.has_slot = False
        self.inputs = 0

    def acquire_slot(self) -> None:
        """Acquire a slot and hold it until the request ends. Call this after the body has been
        received, because slow uploads must not occupy a slot. Raises ApiError 429 if no slot is
        free."""
        self.enter_context(self._slots.slots(self._client))
        self.has_slot = True


class Shared:
    """What all versions of a replica's model share: the limits of `config` and helper threads.

    A request does not occupy one of its `slots` until its body has arrived, so slow uploads do not
    block other clients. `uploads` and `upload_bytes` limit the bodies that are arriving.
    """

    def __init__(self, config: ServingConfig, metrics: Metrics) -> None:
        threads = config.threads_per_replica
        torch.set_num_threads(threads)
        threadpool_limits(threads)  # numpy uses these threads to search galleries
        self.config, self.metrics = config, metrics
        self.slots = ClientLimit(config.max_requests, "requests", full=too_busy)
        self.uploads = ClientLimit(config.max_uploads, "uploads")
        # One body of the maximum size always fits.
        most_bytes = max(config.max_upload_bytes, 2 * config.max_body_bytes)
        self.upload_bytes = ClientLimit(most_bytes, "upload bytes")
        self.helpers = ThreadPoolExecutor(max(2, threads), "prepare")
        # Searches of classes can take a second. They run one at a time and do not delay queries.
        self.searches = ThreadPoolExecutor(1, "search")


class Service:
    """One version of a model, which answers requests. Use it from a single event loop.

    It is freed as soon as nothing refers to it, so no attribute may refer back to it.
    """

    def __init__(
        self, model: Model, shared: Shared, overrides: Mapping[int, float], *, name: str
    ) -> None:
        """The service is ready once the constructor returns. `overrides` are thresholds by class id
        that replace those of the bundle, and `name` is the name of the model. Raises ValueError if
        the model fails its self-check."""
        self.model, self.shared, self.config = model, shared, shared.config
        self.overrides, self.name = overrides, name
        config, self._metrics = shared.config, shared.metrics
        self._slots, self._helpers = shared.slots, shared.helpers
        threads = config.threads_per_replica
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
            lambda features: ranked(model.bundle, torch.stack(list(features))),
            batch_size=config.batch_size,
            wait_seconds=0,
            max_queued=config.max_queued_inputs,
        )
        model.self_check()

    @property
    def version(self) -> str:
        """The version of the bundle, which identifies the contents of its files."""
        return self.model.bundle.version

    def is_healthy(self) -> bool:
        """Return whether no forward pass has hung. A full queue does not make a replica
        unhealthy."""
        return self._batcher.seconds_in_forward() <= HUNG_SECONDS

    def load(self) -> tuple[int, int]:
        """Return the number of requests in progress and the number of inputs waiting for the
        model."""
        return self._slots.in_use, self._batcher.num_queued

    @asynccontextmanager
    async def admitted(self, client: str) -> AsyncIterator[InProgress]:
        """Admit a request for the duration of the context, then count it by its outcome.

        Inside the context, read the body, then call `acquire_slot`. `client` is that of
        `Clients.client_of` (`serving/tokens.py`). Raises ApiError: 429 if too many requests are in
        progress, in total or from this client, or waiting for the model; after the timeout, 408 if
        the request has not acquired a slot yet and 503 if it has.
        """
        started, outcome = time.perf_counter(), "internal"
        progress = InProgress(self._slots, client)
        try:
            with self._slots.slots(client):  # reject before reading the body
                pass
            with progress:
                async with asyncio.timeout(self.config.request_timeout_seconds):
                    yield progress
            outcome = "ok"
        except TimeoutError as error:
            within = f"within {self.config.request_timeout_seconds:g} s"
            late = ApiError(408, "slow_body", f"the body did not arrive {within}. Send it faster")
            if progress.has_slot:
                late = ApiError(503, "timeout", f"no response {within}. Try again", RETRY)
            outcome = late.code
            raise late from error
        except ApiError as error:
            outcome = error.code
            raise
        except (ClientDisconnect, asyncio.CancelledError):
            outcome = "client_left"
            raise
        finally:
            seconds = time.perf_counter() - started
            self._metrics.count(outcome=outcome, inputs=progress.inputs, seconds=seconds)

    async def make_query(self, classes: Sequence[str | int], rule: Rule) -> Query:
        """Create a query from class names or ids. Raises ApiError if it is invalid."""
        known = self.model.bundle.classes
        if len(classes) <= _FEW_CLASSES and all(map(known.contains, classes)):
            return self._make_query(classes, rule)
        # The error message for an unknown class lists similar names, which takes up to a second.
        return await self.in_thread(self._make_query, classes, rule)

    async def computed(
        self,
        inputs: Sequence[bytes | str],
        complete: Callable[[Tensor], T],
    ) -> T:
        """Return `complete(features)` for the features [n, dim] of images (bytes) or texts, which
        are batched with those of other requests. `complete` runs in the model's thread.

        Raises ApiError for an input that cannot be decoded, or if the model's queue is full.
        """
        prepare = [partial(self._prepare, i, raw) for i, raw in enumerate(inputs)]
        return await self._batcher.submit(prepare, complete)

    async def answer(self, inputs: Sequence[bytes | str], query: Query) -> Answer:
        """Compute the verdicts for each input. Raises the same exceptions as `computed`."""
        bundle = self.model.bundle
        return await self.computed(inputs, lambda features: answer(bundle, features, query))

    async def classify(
        self, inputs: Sequence[bytes | str], top: int, query: Query
    ) -> Classification:
        """Find the `top` classes with the largest scores of each input, and decide by the rule of
        `query` whether they match. Raises the same exceptions as `computed`."""
        features = await self.computed(inputs, lambda features: features)
        rows = [partial(features.__getitem__, i) for i in range(len(features))]
        return await self._ranker.submit(
            rows, lambda found: classification(self.model.bundle, found[:, :top], query)
        )

    async def in_thread(self, function: Any, *arguments: Any) -> Any:
        """Run a blocking function in this replica's thread pool, not on the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._helpers, function, *arguments)

    async def parsed(self, function: Any, raw: bytes, *arguments: Any) -> Any:
        """Return `function(raw, …)`. Short JSON is parsed on the event loop, because a switch of
        threads costs more than most of it; other JSON is parsed in a thread."""
        if len(raw) <= _SHORT_BYTES:
            return function(raw, *arguments)
        return await self.in_thread(function, raw, *arguments)

    def _make_query(self, classes: Sequence[str | int], rule: Rule) -> Query:
        try:
            class_ids = [self.model.bundle.classes.id_of(name_or_id) for name_or_id in classes]
        except ValueError as error:
            raise ApiError(404, "unknown_class", str(error)) from error
        try:
            return make_query(
                self.model.bundle,
                class_ids,
                recall=rule.recall,
                threshold=rule.threshold,
                require=rule.require or (self.config.require if rule.recall is not None else None),
                overrides=self.overrides,
            )
        except ValueError as error:
            raise ApiError(422, "invalid_query", str(error)) from error

    def _prepare(self, position: int, raw: bytes | str) -> Any:
        try:
            return self.model.prepare(raw)
        except ValueError as error:
            code = "not_a_picture" if isinstance(raw, bytes) else "not_a_text"
            message = f"{self.model.reads}[{position}]: {error}"
            raise ApiError(400, code, message) from error
