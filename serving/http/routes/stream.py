"""`POST /v1/query:stream`: lines in, hits out while the body still comes.

A few lines are with the model at a time, so that batches form; while they are, nothing more is
read, and a client that sends faster is held up by its connection. Answers keep the lines' order.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import Field, RootModel
from starlette.requests import ClientDisconnect

from serving.answer import Question
from serving.api_error import ApiError
from serving.batching import QueueFullError
from serving.http.error_responses import REFUSALS
from serving.http.input_lines import LineIn, parse_line, verdicts_of
from serving.http.openapi import NdjsonSchema, refused, request_body
from serving.http.query_body import QuestionParameters
from serving.http.request_body import content_type, reject_compression
from serving.http.routing import Resources, ServiceDep, facts, per_application
from serving.http.streams import (
    NDJSON,
    NDJSON_KINDS,
    LinesOut,
    NdjsonAnswer,
    count_lines,
    split_lines,
)
from serving.limits import ClientLimit
from serving.schemas import Answer, Counts, Done, ErrorDetail, Hit, Id, LineError
from serving.service import InProgress, Service

_Waiting = asyncio.Queue[asyncio.Task[Hit | LineError] | None]
# How long a line waits before it asks again for a place in the model's queue.
_QUEUE_SECONDS = 0.02


class StreamParameters(QuestionParameters):
    all: bool = Field(False, description="every verdict of every line, and not the matches alone")


class LineOut(RootModel[Hit | LineError | Done]):
    """One line of the answer."""


router = APIRouter()


def _limit(resources: Resources) -> ClientLimit:
    config = resources.service.config
    return ClientLimit(config.max_streams, "streams", most_each=config.max_streams_per_client)


@router.post(
    "/v1/query:stream",
    response_class=NdjsonSchema,
    responses={
        200: {"model": LineOut, "description": "a line for each hit, the last one with counts"},
        **refused(*REFUSALS),
    },
    openapi_extra=request_body(LineIn, NDJSON),
)
@facts(streams=True)
async def stream(
    request: Request,
    asked: Annotated[StreamParameters, Query()],
    service: ServiceDep,
    limit: Annotated[ClientLimit, Depends(per_application(_limit))],
) -> Response:
    """Is each line's picture, or text, of these classes? Answered while lines still come.

    Read the answer while you send: who does not read is not read either.
    """
    kind, _ = content_type(request.headers)
    if kind not in (*NDJSON_KINDS, ""):
        message = f"send lines of JSON as {NDJSON}, not {kind[:80]!r}"
        raise ApiError(415, "unknown_content_type", message)
    reject_compression(request)

    async def work(request: Request, out: LinesOut) -> None:
        classes = asked.needed_classes(service.config.max_classes)
        async with service.admitted(is_timed=False) as progress:
            # Inside: a stream that is rejected by the limit is counted, too.
            with limit.one(request.state.client):
                progress.take_slot()
                question = await service.question(classes, asked.recall, asked.threshold)
                await out.start()
                answering = _Stream(service, question, asked.all, progress)
                await answering.run(request.stream(), out)

    return NdjsonAnswer(work, idle_seconds=service.config.stream_idle_seconds)


def _said(line: Hit | LineError | Done) -> str:
    """A line without what there is none of at its top level."""
    unset = {name for name in ("line", "id", "notice") if getattr(line, name, "") is None}
    return line.model_dump_json(by_alias=True, exclude=unset)


class _Stream:
    """One stream on its way: lines that are with the model, in their order, and what came of them.

    Memory: the lines in flight hold as many bytes as one request's body may.
    """

    def __init__(
        self, service: Service, question: Question, all_: bool, progress: InProgress
    ) -> None:
        self._service, self._question, self._all = service, question, all_
        self._progress, self._limits = progress, service.config
        self._decides = question.decides
        self._counts = Counts(inputs=0, hits=0 if self._decides else None, errors=0)
        self._bytes, self._fewer_bytes = 0, asyncio.Event()

    async def run(self, body: AsyncIterator[bytes], out: LinesOut) -> None:
        """Answer every line; ClientDisconnect where the client left, or does not read."""
        waiting: _Waiting = asyncio.Queue(self._limits.max_lines_in_flight)
        has_left = False
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(body, waiting, tasks))
                while (answering := await waiting.get()) is not None:
                    await self._write(await answering, out)
                if (early := await reader) is not None:
                    await out.line(_said(LineError(error=early)))
                await out.line(_said(Done(done=self._counts)))
        except* ClientDisconnect:
            has_left = True
        if has_left:
            raise ClientDisconnect

    async def _read(
        self, body: AsyncIterator[bytes], waiting: _Waiting, tasks: asyncio.TaskGroup
    ) -> ErrorDetail | None:
        """Give the model one line after the other; why it ended early, if it did."""
        lines, place, early = split_lines(body, self._limits.max_body_bytes), 0, None
        seconds = self._limits.stream_idle_seconds
        while True:
            try:
                async with asyncio.timeout(seconds):
                    raw = await anext(lines)
            except StopAsyncIteration:
                break
            except TimeoutError:
                message = f"no line came for {seconds:g} s: an empty one now and then is enough"
                early = ErrorDetail(code="idle", message=message)
                break
            if raw is None or raw.strip():
                await self._room_for(raw)
                await waiting.put(tasks.create_task(self._answer(place, raw)))
            place += count_lines(raw)
        await waiting.put(None)
        return early

    async def _room_for(self, raw: bytes | None) -> None:
        size = len(raw or b"")
        while self._bytes and self._bytes + size > self._limits.max_body_bytes:
            self._fewer_bytes.clear()
            await self._fewer_bytes.wait()
        self._bytes += size

    async def _answer(self, place: int, raw: bytes | None) -> Hit | LineError:
        id_: Id | None = None
        try:
            reads = self._service.model.reads
            line = await self._service.parsed(parse_line, self._whole(raw), reads, self._limits)
            id_ = line.id
            if isinstance(line.content, ApiError):
                raise line.content
            answer = await self._ask(line.content)
        except ApiError as error:
            # Where there is one input alone, its place in the request says nothing.
            message = str(error).removeprefix("images[0]: ").removeprefix("texts[0]: ")
            return LineError(
                line=place, id=id_, error=ErrorDetail(code=error.code, message=message)
            )
        finally:
            self._bytes -= len(raw or b"")
            self._fewer_bytes.set()
        is_short = self._decides and not self._all
        return Hit(line=place, id=id_, verdicts=verdicts_of(answer, is_short), notice=answer.notice)

    def _whole(self, raw: bytes | None) -> bytes:
        if raw is None:
            limit = self._limits.max_body_bytes
            message = f"the line is over {limit} bytes: send a smaller picture or text"
            raise ApiError(413, "line_too_long", message)
        return raw

    async def _ask(self, one: bytes | str) -> Answer:
        """The answer about one input, which waits where the queue for the model is full."""
        seconds = self._limits.request_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        return await self._service.answer([one], self._question)
                    except QueueFullError:
                        await asyncio.sleep(_QUEUE_SECONDS)
        except TimeoutError as error:
            raise ApiError(503, "timeout", f"no answer within {seconds:g} s") from error

    async def _write(self, line: Hit | LineError, out: LinesOut) -> None:
        if isinstance(line, LineError):
            self._counts.errors += 1
        else:
            self._counts.inputs += 1
            self._progress.inputs += 1
            if self._counts.hits is not None:
                self._counts.hits += any(one.match for one in line.verdicts)
            if not line.verdicts:
                return
        await out.line(_said(line))
