"""A request's way through one replica: admission, decoding, the batch, the answer, the count.

It has no HTTP routes (`serving/api.py`) and does not know how replicas are run.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from fastapi import Request
from starlette.requests import ClientDisconnect
from torch import Tensor

from serving.answer import Answer, Question, answer, ask
from serving.batching import Batcher, QueueFullError
from serving.bodies import Query, read_query
from serving.config import ServingConfig
from serving.errors import ApiError
from serving.model import Model

_RETRY = {"Retry-After": "1"}
# A forward pass that runs this long has hung, for example in a broken driver.
_HUNG_SECONDS = 120.0


class Counts(Protocol):
    """Where finished requests are counted."""

    def count(self, *, outcome: str, inputs: int, seconds: float) -> None: ...


class Service:
    """A model that answers requests, within the limits of `config`. Used from one event loop."""

    def __init__(self, model: Model, config: ServingConfig, counts: Counts) -> None:
        """Raises ValueError when the model fails its self-check: it is ready once this returns."""
        cores = os.cpu_count() or 1
        torch.set_num_threads(config.threads or max(1, cores // config.replicas))
        self.model, self.config = model, config
        self._counts = counts
        self._in_progress = 0
        self._helpers = ThreadPoolExecutor(max(2, cores // config.replicas), "prepare")
        self._batcher = Batcher(
            model.features,
            batch_size=max(1, config.batch_size // model.crops),
            wait_seconds=config.batch_wait_seconds,
            max_queued=config.max_queued_inputs,
        )
        model.self_check()

    def check_health(self) -> None:
        """Raises RuntimeError when the model has hung. A full queue is no illness."""
        if self._batcher.seconds_in_forward() > _HUNG_SECONDS:
            raise RuntimeError(f"a forward pass has taken over {_HUNG_SECONDS:.0f} s")

    async def query(self, request: Request) -> Answer:
        """Answer `POST /v1/query`. Every refusal is an ApiError; each request is counted once."""
        started = time.perf_counter()
        outcome, inputs = "internal", 0
        try:
            found = await self._admitted(request)
            outcome, inputs = "ok", len(found.results)
            return found
        except ApiError as error:
            outcome = error.code
            raise
        except (ClientDisconnect, asyncio.CancelledError):
            outcome = "client_left"
            raise
        finally:
            seconds = time.perf_counter() - started
            self._counts.count(outcome=outcome, inputs=inputs, seconds=seconds)

    async def _admitted(self, request: Request) -> Answer:
        if self._in_progress >= self.config.max_requests:
            raise _busy()
        self._in_progress += 1
        seconds = self.config.request_timeout_seconds
        query = None
        try:
            async with asyncio.timeout(seconds):
                query = await read_query(request, self.config, self.model.reads)
                return await self._answer(query)
        except TimeoutError as error:
            if query is None:
                raise ApiError(
                    408,
                    "slow_body",
                    f"the body did not arrive within {seconds:g} s: send it faster",
                ) from error
            raise ApiError(
                503, "timeout", f"no answer within {seconds:g} s: try again", _RETRY
            ) from error
        except QueueFullError as error:
            raise _busy() from error
        finally:
            self._in_progress -= 1

    async def _answer(self, query: Query) -> Answer:
        loop = asyncio.get_running_loop()
        question = await loop.run_in_executor(self._helpers, self._ask, query)
        inputs = await asyncio.gather(
            *(
                loop.run_in_executor(self._helpers, self._prepare, place, raw)
                for place, raw in enumerate(query.inputs)
            )
        )
        features = await self._batcher.submit(inputs)
        return await loop.run_in_executor(self._helpers, self._decide, features, question)

    def _ask(self, query: Query) -> Question:
        try:
            class_ids = [self.model.bundle.class_id(wanted) for wanted in query.classes]
        except ValueError as error:
            raise ApiError(404, "unknown_class", str(error)) from error
        try:
            return ask(self.model.bundle, class_ids, recall=query.recall, threshold=query.threshold)
        except ValueError as error:
            raise ApiError(422, "invalid_query", str(error)) from error

    def _prepare(self, place: int, raw: bytes | str) -> Any:
        try:
            return self.model.prepare(raw)
        except ValueError as error:
            code, field = (
                ("not_a_picture", "images") if isinstance(raw, bytes) else ("not_a_text", "texts")
            )
            raise ApiError(400, code, f"{field}[{place}]: {error}") from error

    def _decide(self, features: Tensor, question: Question) -> Answer:
        return answer(self.model.bundle, features, question)

    def search(self, text: str, *, limit: int, offset: int) -> tuple[Sequence[int], int]:
        """Ids of classes whose names contain `text`, a page of them, and how many there are."""
        return self.model.bundle.names.search(text, limit=limit, offset=offset)


def _busy() -> ApiError:
    return ApiError(429, "too_busy", "too many requests wait for the model: try again", _RETRY)
