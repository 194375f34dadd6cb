"""`POST /v1/query` and `POST /v1/query:stream`: does each image or text belong to the classes?

A query is JSON, a form or a raw body. A stream has one input per line, and hits are sent while the
body is still arriving. Several lines are processed concurrently to form batches. Once
`max_lines_in_flight` is reached, reading pauses, so TCP backpressure slows down a client that sends
faster than the lines are answered. Answers are in the order of the lines.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi import Query as QueryParam
from fastapi.responses import Response
from pydantic import Field, RootModel

from serving.answer import Query
from serving.api_error import ApiError
from serving.http.direct_query import PATH, answer_query
from serving.http.error_responses import ERROR_RESPONSES
from serving.http.input_lines import LineIn, parse_line, selected_verdicts
from serving.http.openapi import (
    NdjsonSchema,
    error_responses,
    raw_inputs,
    request_body,
    schema_of,
)
from serving.http.query_body import QueryBody, QueryParameters
from serving.http.routing import Resources, ServiceDep, facts, per_application
from serving.http.streams import (
    NDJSON,
    NDJSON_KINDS,
    LinesOut,
    NdjsonAnswer,
    check_is_ndjson,
    count_lines,
    split_lines,
)
from serving.limits import ClientLimit
from serving.pipeline import pump_all
from serving.schemas import Answer, Counts, Done, ErrorDetail, Hit, Id, LineError
from serving.service import InProgress, Service

_FORM = {
    "type": "object",
    "required": ["classes"],
    "properties": {
        "classes": {"type": "array", "items": {"type": "string"}},
        "images": {"type": "array", "items": {"type": "string", "format": "binary"}},
        "texts": {"type": "array", "items": {"type": "string"}},
        "recall": {"type": "number"},
        "threshold": {"type": "number"},
    },
}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": schema_of(QueryBody)},
            "multipart/form-data": {"schema": _FORM},
            **raw_inputs("the classes are in the URL"),
        },
    }
}


router = APIRouter()


@router.post(PATH, responses=ERROR_RESPONSES, openapi_extra=_BODY)
@facts(is_idempotent=True)
async def query(
    request: Request, parameters: Annotated[QueryParameters, QueryParam()], service: ServiceDep
) -> Answer:
    """Does each image or text belong to these classes?

    Send JSON with images in base64, a form with files, or a single image or text as the body, with
    the classes in the URL.
    """
    return await answer_query(request, parameters, service)


class StreamParameters(QueryParameters):
    all: bool = Field(
        False, description="return all verdicts of every line instead of only the matches"
    )


class LineOut(RootModel[Hit | LineError | Done]):
    """One line of the response."""


def _limit(resources: Resources) -> ClientLimit:
    config = resources.service.config
    return ClientLimit(config.max_streams, "streams", per_client=config.max_streams_per_client)


@router.post(
    "/v1/query:stream",
    response_class=NdjsonSchema,
    responses={
        200: {"model": LineOut, "description": "one line per hit, and a last line with counts"},
        **error_responses(*ERROR_RESPONSES),
    },
    openapi_extra=request_body(LineIn, NDJSON),
)
@facts(streams=True)
async def stream(
    request: Request,
    parameters: Annotated[StreamParameters, QueryParam()],
    service: ServiceDep,
    limit: Annotated[ClientLimit, Depends(per_application(_limit))],
) -> Response:
    """Does the image or text in each line belong to these classes?

    Lines are answered while you are still sending more. Read the response as you send: if you do
    not, the server stops reading your lines.
    """
    check_is_ndjson(request, kinds=(*NDJSON_KINDS, ""))

    async def work(request: Request, out: LinesOut) -> None:
        key = request.state.limit_key
        classes = parameters.needed_classes(service.config.max_classes)
        async with service.admitted(key, is_timed=False) as progress:
            # Acquire the slot inside this context, so that a stream rejected by the limit is also
            # counted.
            with limit.slot(key):
                progress.acquire_slot()
                query = await service.make_query(classes, parameters.recall, parameters.threshold)
                await out.start()
                answering = _Stream(service, query, parameters.all, progress)
                await answering.run(request.stream(), out)

    return NdjsonAnswer(work, idle_seconds=service.config.stream_idle_seconds)


def _as_json(line: Hit | LineError | Done) -> str:
    """Return a line as JSON, without the fields `line`, `id` and `notice` if they are null."""
    unset = {name for name in ("line", "id", "notice") if getattr(line, name, "") is None}
    return line.model_dump_json(by_alias=True, exclude=unset)


class _Stream:
    """One stream, with its lines in progress and the counts for its last line.

    The total size of the lines in progress is at most the size limit of one request body.
    """

    def __init__(self, service: Service, query: Query, all_: bool, progress: InProgress) -> None:
        self._service, self._query, self._all = service, query, all_
        self._progress, self._limits = progress, service.config
        self._decides = query.decides
        self._counts = Counts(inputs=0, hits=0 if self._decides else None, errors=0)
        self._bytes, self._fewer_bytes = 0, asyncio.Event()

    async def run(self, body: AsyncIterator[bytes], out: LinesOut) -> None:
        """Answer every line. Raises ClientDisconnect if the client disconnects or does not read the
        answers."""

        async def write(line: Hit | LineError) -> None:
            self._count(line)
            if isinstance(line, LineError) or line.verdicts:
                await out.line(_as_json(line))

        try:
            most = self._limits.max_lines_in_flight
            await pump_all(self._lines(body), self._answer, write, limit=most)
        except ApiError as error:  # the stream ends early
            await out.line(_as_json(LineError(error=_detail(error))))
        await out.line(_as_json(Done(done=self._counts)))

    async def _lines(self, body: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, bytes | None]]:
        """Yield each line with its position, or None in place of a line that is too long. Raises
        ApiError if no line arrives for too long."""
        lines, position = split_lines(body, self._limits.max_body_bytes), 0
        seconds = self._limits.stream_idle_seconds
        while True:
            try:
                async with asyncio.timeout(seconds):
                    raw = await anext(lines)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                message = (
                    f"no line arrived within {seconds:g} s. Send empty lines to keep the stream "
                    "open"
                )
                raise ApiError(408, "idle", message) from error
            if raw is None or raw.strip():
                await self._wait_for_bytes(raw)
                yield position, raw
            position += count_lines(raw)

    async def _wait_for_bytes(self, raw: bytes | None) -> None:
        size = len(raw or b"")
        while self._bytes and self._bytes + size > self._limits.max_body_bytes:
            self._fewer_bytes.clear()
            await self._fewer_bytes.wait()
        self._bytes += size

    async def _answer(self, item: tuple[int, bytes | None]) -> Hit | LineError:
        position, raw = item
        id_: Id | None = None
        try:
            service, reads = self._service, self._service.model.reads
            line = await service.parsed(parse_line, self._whole(raw), reads, self._limits)
            id_, content = line.id, line.content
            if isinstance(content, ApiError):
                raise content
            answer = await service.when_queue_has_room(
                lambda: service.answer([content], self._query)
            )
        except ApiError as error:
            return LineError(line=position, id=id_, error=_detail(error))
        finally:
            self._bytes -= len(raw or b"")
            self._fewer_bytes.set()
        verdicts = selected_verdicts(answer, matches_only=self._decides and not self._all)
        return Hit(line=position, id=id_, verdicts=verdicts, notice=answer.notice)

    def _whole(self, raw: bytes | None) -> bytes:
        if raw is None:
            limit = self._limits.max_body_bytes
            message = f"the line is larger than {limit} bytes. Send a smaller image or text"
            raise ApiError(413, "line_too_long", message)
        return raw

    def _count(self, line: Hit | LineError) -> None:
        if isinstance(line, LineError):
            self._counts.errors += 1
            return
        self._counts.inputs += 1
        self._progress.inputs += 1
        if self._counts.hits is not None:
            self._counts.hits += any(one.match for one in line.verdicts)


def _detail(error: ApiError) -> ErrorDetail:
    # A line has one input, so remove its index from the message.
    message = str(error).removeprefix("images[0]: ").removeprefix("texts[0]: ")
    return ErrorDetail(code=error.code, message=message)
