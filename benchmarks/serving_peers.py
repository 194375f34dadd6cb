"""The hand-written application that the servers are compared with: `plain` is FastAPI on uvicorn,
`ray` is the same application on Ray Serve. Arguments: KIND BUNDLE PORT.

It validates its input, batches across requests, and uses kway's model, preprocessing and response
format, with one torch thread. Its settings of Ray are those of kway.
"""

import asyncio
import base64
import binascii
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from serving.answer import Query, answer, make_query
from serving.model import Model
from serving.schemas import Answer

_BATCH, _MAX_QUEUED, _MAX_BODY_BYTES = 32, 256, 32 * 2**20


class QueryBody(BaseModel):
    """A query that asks, for each image, whether it belongs to each of these classes."""

    classes: Annotated[list[str | int], Field(min_length=1, max_length=100)]
    images: Annotated[list[str], Field(min_length=1, max_length=64)]
    recall: Annotated[float, Field(gt=0, le=1)] | None = None
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = None


@dataclass(frozen=True)
class _Waiting:
    """A request waiting for its batch."""

    images: list[bytes]
    query: Query
    answer: asyncio.Future[Answer]


class _Batches:
    """Dynamic batching: requests that arrive while the model is running form the next batch.

    One thread does all the work of a batch. Of several variants, this one used the least CPU time.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(_MAX_QUEUED)
        self._thread = ThreadPoolExecutor(1)

    async def answer(self, images: list[bytes], query: Query) -> Answer:
        """Answer a query. Raises HTTPException 400 for data that is not an image, and 429 if too
        many queries are waiting."""
        waiting = _Waiting(images, query, asyncio.get_running_loop().create_future())
        try:
            self._queue.put_nowait(waiting)
        except asyncio.QueueFull as error:
            raise HTTPException(429, "try again", {"Retry-After": "1"}) from error
        return await waiting.answer

    async def work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            while len(batch) < _BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            found = await loop.run_in_executor(self._thread, self._answers, batch)
            for one, answered in zip(batch, found, strict=True):
                if one.answer.done():  # its client has disconnected
                    continue
                if isinstance(answered, HTTPException):
                    one.answer.set_exception(answered)
                else:
                    one.answer.set_result(answered)

    def _answers(self, batch: Sequence[_Waiting]) -> list[Answer | HTTPException]:
        found: list[list[Any] | HTTPException] = []
        for one in batch:
            try:
                found.append([self._model.prepare(image) for image in one.images])
            except ValueError as error:
                found.append(HTTPException(400, f"images: {error}"))
        inputs = [image for one in found if isinstance(one, list) for image in one]
        rows = iter(self._model.features(inputs)) if inputs else iter(())
        answers: list[Answer | HTTPException] = []
        for one, waiting in zip(found, batch, strict=True):
            if isinstance(one, HTTPException):
                answers.append(one)
                continue
            features = torch.stack([next(rows) for _ in waiting.images])
            answers.append(answer(self._model.bundle, features, waiting.query))
        return answers


def application(bundle: Path) -> FastAPI:
    torch.set_num_threads(1)
    model = Model.open(bundle)
    batches = _Batches(model)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batches.work())
        yield
        worker.cancel()

    api = FastAPI(lifespan=lifespan)

    @api.post("/v1/query")
    async def query(request: Request, body: QueryBody) -> Answer:
        if int(request.headers.get("content-length", _MAX_BODY_BYTES)) > _MAX_BODY_BYTES:
            raise HTTPException(413, "the request body is too large: send fewer images")
        try:
            images = [base64.b64decode(one, validate=True) for one in body.images]
        except binascii.Error as error:
            raise HTTPException(400, f"images: {error}") from error
        try:
            asked = make_query(
                model.bundle, body.classes, recall=body.recall, threshold=body.threshold
            )
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        return await batches.answer(images, asked)

    return api


def _on_ray(bundle: str, port: int) -> None:
    import ray
    from ray import serve
    from ray.serve.schema import LoggingConfig

    logging = LoggingConfig(log_level="WARNING", enable_access_log=False)
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=logging)

    @serve.deployment(max_ongoing_requests=_MAX_QUEUED, logging_config=logging)
    @serve.ingress(lambda: application(Path(bundle)))
    class Peer:
        pass

    serve.run(Peer.bind())
    while True:
        time.sleep(60)


if __name__ == "__main__":
    kind, path, port = sys.argv[1:]
    if kind == "ray":
        _on_ray(path, int(port))
    else:
        uvicorn.run(application(Path(path)), port=int(port), log_level="error", access_log=False)
