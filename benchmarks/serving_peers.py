"""Serve the same query without kway's server, with one torch thread. Arguments: KIND BUNDLE PORT.

`fastapi` is a plain FastAPI application on uvicorn that validates its input and batches across
requests; `litserve` is the equivalent LitServe API. Both accept the JSON of `POST /v1/query` with
images and use kway's model, preprocessing and response format.
"""

import asyncio
import base64
import binascii
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import litserve
import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field, ValidationError

from serving.answer import Query, answer, make_query
from serving.model import Model
from serving.schemas import Answer

PATH = "/v1/query"
BATCH, MAX_QUEUED, _MAX_BODY_BYTES = 32, 256, 32 * 2**20
# LitServe polls its queue. Without a timeout, it uses a full core; longer timeouts delay batches.
_BATCH_SECONDS = 0.002


class QueryBody(BaseModel):
    """A query that asks, for each image, whether it belongs to each of these classes."""

    classes: Annotated[list[str | int], Field(min_length=1, max_length=100)]
    images: Annotated[list[str], Field(min_length=1, max_length=64)]
    recall: Annotated[float, Field(gt=0, le=1)] | None = None
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = None


def images_of(body: QueryBody) -> list[bytes]:
    try:
        return [base64.b64decode(one, validate=True) for one in body.images]
    except binascii.Error as error:
        raise HTTPException(400, f"images: {error}") from error


def query_of(model: Model, body: QueryBody) -> Query:
    try:
        return make_query(model.bundle, body.classes, recall=body.recall, threshold=body.threshold)
    except ValueError as error:
        raise HTTPException(422, str(error)) from error


def prepared(model: Model, images: Sequence[bytes]) -> list[Any]:
    try:
        return [model.prepare(one) for one in images]
    except ValueError as error:
        raise HTTPException(400, f"images: {error}") from error


@dataclass(frozen=True)
class Waiting:
    """A request waiting for its batch."""

    images: list[bytes]
    query: Query
    answer: asyncio.Future[Answer]


class Batches:
    """Dynamic batching: requests that arrive while the model is running form the next batch.

    One thread does all the work of a batch. Of several variants, this one used the least CPU time.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue(MAX_QUEUED)
        self._thread = ThreadPoolExecutor(1)

    async def answer(self, images: list[bytes], query: Query) -> Answer:
        """Answer a query.

        Raises HTTPException 400 for data that is not an image, and 429 if too many queries are
        waiting.
        """
        waiting = Waiting(images, query, asyncio.get_running_loop().create_future())
        try:
            self._queue.put_nowait(waiting)
        except asyncio.QueueFull as error:
            raise HTTPException(429, "try again", {"Retry-After": "1"}) from error
        return await waiting.answer

    async def work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            while len(batch) < BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            found = await loop.run_in_executor(self._thread, self._answers, batch)
            for one, answered in zip(batch, found, strict=True):
                if one.answer.done():  # its client has disconnected
                    continue
                if isinstance(answered, HTTPException):
                    one.answer.set_exception(answered)
                else:
                    one.answer.set_result(answered)

    def _answers(self, batch: Sequence[Waiting]) -> list[Answer | HTTPException]:
        found: list[Answer | HTTPException | list[Any]] = []
        for one in batch:
            try:
                found.append(prepared(self._model, one.images))
            except HTTPException as error:
                found.append(error)
        inputs = [x for one in found if isinstance(one, list) for x in one]
        rows = iter(self._model.features(inputs)) if inputs else iter(())
        answers: list[Answer | HTTPException] = []
        for one, waiting in zip(found, batch, strict=True):
            if isinstance(one, HTTPException):
                answers.append(one)
                continue
            features = torch.stack([next(rows) for _ in waiting.images])
            answers.append(answer(self._model.bundle, features, waiting.query))
        return answers


def plain(bundle: Path) -> FastAPI:
    """Return the plain FastAPI application."""
    model = Model.open(bundle)
    batches = Batches(model)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batches.work())
        yield
        worker.cancel()

    api = FastAPI(lifespan=lifespan)

    @api.post(PATH)
    async def query(request: Request, body: QueryBody) -> Answer:
        if int(request.headers.get("content-length", _MAX_BODY_BYTES)) > _MAX_BODY_BYTES:
            raise HTTPException(413, "the request body is too large: send fewer images")
        return await batches.answer(images_of(body), query_of(model, body))

    return api


class ImageAPI(litserve.LitAPI):  # type: ignore[misc]
    """The LitServe API; a request has one image."""

    def __init__(self, bundle: Path) -> None:
        super().__init__(max_batch_size=BATCH, batch_timeout=_BATCH_SECONDS, api_path=PATH)
        self._bundle = bundle

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self.model = Model.open(self._bundle)

    def decode_request(self, request: dict[str, Any]) -> tuple[Any, Query]:
        try:
            body = QueryBody.model_validate(request)
        except ValidationError as error:
            raise HTTPException(422, error.errors(include_url=False)[0]["msg"]) from error
        (one,) = prepared(self.model, images_of(body))
        return one, query_of(self.model, body)

    def batch(self, inputs: list[tuple[Any, Query]]) -> list[tuple[Any, Query]]:
        return inputs

    def predict(self, inputs: list[tuple[Any, Query]]) -> list[Answer]:
        features = self.model.features([one for one, _ in inputs])
        return [
            answer(self.model.bundle, row[None], query)
            for row, (_, query) in zip(features, inputs, strict=True)
        ]

    def unbatch(self, output: list[Answer]) -> list[Answer]:
        return output

    def encode_response(self, output: Answer) -> dict[str, Any]:
        return output.model_dump()


def main() -> None:
    kind, bundle, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    if kind == "fastapi":
        uvicorn.run(plain(bundle), port=port, log_level="error", access_log=False)
        return
    server = litserve.LitServer(
        ImageAPI(bundle),
        accelerator="cpu",
        fast_queue=True,
        max_payload_size=_MAX_BODY_BYTES,
    )
    server.run(
        host="127.0.0.1",
        port=port,
        generate_client_file=False,
        log_level="error",
        access_log=False,
    )


if __name__ == "__main__":
    main()
