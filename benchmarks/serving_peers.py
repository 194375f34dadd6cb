"""The hand-written application that the servers are compared with: `plain` is FastAPI on uvicorn,
`ray` is the same application on Ray Serve. Arguments: KIND PORT BUNDLE

It batches across requests, and uses kway's model, preprocessing and response format, with one torch
thread. Its settings of Ray are those of kway.
"""

import asyncio
import sys
import time
from base64 import b64decode
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from serving.answer import Query, answer, make_query
from serving.model import Model
from serving.schemas import Answer

_BATCH, _MAX_QUEUED = 32, 256


class QueryBody(BaseModel):
    classes: Annotated[list[str | int], Field(min_length=1, max_length=100)]
    images: Annotated[list[str], Field(min_length=1, max_length=64)]
    recall: Annotated[float, Field(gt=0, le=1)] | None = None
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = None


class _Waiting(NamedTuple):
    images: list[bytes]
    query: Query
    answer: "asyncio.Future[Answer]"


class _Batches:
    """Answers queries with a model. Those that arrive while it is running form the next batch."""

    def __init__(self, bundle: Path) -> None:
        self.model = Model.open(bundle)
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(_MAX_QUEUED)

    async def answer(self, body: QueryBody) -> Answer:
        try:
            images = [b64decode(one, validate=True) for one in body.images]
            rule = {"recall": body.recall, "threshold": body.threshold}
            asked = make_query(self.model.bundle, body.classes, **rule)  # type: ignore[arg-type]
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        waiting = _Waiting(images, asked, asyncio.get_running_loop().create_future())
        await self._queue.put(waiting)
        return await waiting.answer

    async def work(self) -> None:
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1)
        while True:
            batch = [await self._queue.get()]
            while len(batch) < _BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            found = await loop.run_in_executor(thread, self._answers, batch)
            for one, answered in zip(batch, found, strict=True):
                if not one.answer.done():  # its client may have disconnected
                    one.answer.set_result(answered)

    def _answers(self, batch: list[_Waiting]) -> list[Answer]:
        prepared = [self.model.prepare(image) for one in batch for image in one.images]
        rows = self.model.features(prepared).split([len(one.images) for one in batch])
        pairs = zip(rows, batch, strict=True)
        return [answer(self.model.bundle, features, one.query) for features, one in pairs]


def application(bundle: Path) -> FastAPI:
    torch.set_num_threads(1)
    model = _Batches(bundle)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(model.work())
        yield
        worker.cancel()

    api = FastAPI(lifespan=lifespan)
    api.post("/query")(model.answer)
    return api


def _on_ray(bundle: Path, port: int) -> None:
    import ray
    from ray import serve
    from ray.serve.schema import LoggingConfig

    logging = LoggingConfig(log_level="WARNING", enable_access_log=False)
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=logging)

    @serve.deployment(max_ongoing_requests=_MAX_QUEUED, logging_config=logging)
    @serve.ingress(lambda: application(bundle))
    class Peer:
        pass

    serve.run(Peer.bind())
    while True:
        time.sleep(60)


if __name__ == "__main__":
    kind, listen_on, path = sys.argv[1:]
    if kind == "ray":
        _on_ray(Path(path), int(listen_on))
    else:
        options = {"port": int(listen_on), "log_level": "error", "access_log": False}
        uvicorn.run(application(Path(path)), **options)  # type: ignore[arg-type]
