"""`/v1/watches`: create, list, renew, delete and listen to the watches of a client."""

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request, WebSocket
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import HTTPConnection

from serving.answer import Query as ClassQuery
from serving.answer import threshold_of
from serving.api_error import RETRY, ApiError, validated, watches_down
from serving.http.error_responses import ERROR_RESPONSES
from serving.http.openapi import NdjsonSchema, error_responses, request_body
from serving.http.query_body import check_class_count
from serving.http.request_body import content_type, parse_json, read_body
from serving.http.routing import Resources, ResourcesDep, facts, per_application
from serving.http.streams import (
    LinesOut,
    MessagesOut,
    NdjsonAnswer,
    answer_socket,
    until_disconnect,
    wait_for_close,
)
from serving.limits import ClientLimit
from serving.schemas import ClassDrift, ClassThreshold
from serving.service import InProgress, Service
from serving.tokens import Client
from serving.watches.listeners import listen_to
from serving.watches.schemas import (
    ListenLine,
    WatchBody,
    WatchChanges,
    WatchInfo,
    WatchList,
    WebhookInfo,
)
from serving.watches.watch import (
    ListenerLimitError,
    NoWatchesError,
    Terms,
    UnknownCursorError,
    UnknownListenerError,
    UnknownWatchError,
    Watch,
    WatchesDownError,
    WatchLimitError,
)
from serving.watches.webhook import Webhook

T = TypeVar("T", bound=BaseModel)
_MAX_BODY_BYTES = 2**18
_SEND_SECONDS = 60.0


def _some(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: ERROR_RESPONSES[status] for status in statuses}


class ListenParameters(BaseModel):
    """Where a listener begins."""

    model_config = ConfigDict(extra="forbid")

    after: int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="send the stored hits after this cursor first; 0 for all stored hits (default: "
        "only new hits)",
    )


router = APIRouter()


def _limit(resources: Resources) -> ClientLimit:
    return ClientLimit(resources.service.config.max_listeners, "listeners")


LimitDep = Annotated[ClientLimit, Depends(per_application(_limit))]


@router.post(
    "/v1/watches", status_code=201, responses=ERROR_RESPONSES, openapi_extra=request_body(WatchBody)
)
async def create(request: Request, resources: ResourcesDep) -> WatchInfo:
    """Create a watch: a query that is evaluated on every frame until it expires."""
    service = resources.service
    async with service.admitted(request.state.limit_key) as progress:
        terms = await _terms(service, await _read(request, WatchBody, progress, service))
        with _as_api_errors():
            watch = await resources.watches.create(request.state.client, terms)
            return await _described(service, watch)


@router.get("/v1/watches", responses=_some(503))
async def owned(request: Request, resources: ResourcesDep) -> WatchList:
    """List your watches, oldest first."""
    with _as_api_errors():
        found = await resources.watches.owned(request.state.client)
    return WatchList(watches=[await _described(resources.service, watch) for watch in found])


@router.get("/v1/watches/{watch_id}", responses=_some(404, 422, 503))
async def get(request: Request, watch_id: str, resources: ResourcesDep) -> WatchInfo:
    """Return one of your watches."""
    with _as_api_errors():
        watch = await resources.watches.get(request.state.client, watch_id)
        return await _described(resources.service, watch)


@router.patch(
    "/v1/watches/{watch_id}", responses=ERROR_RESPONSES, openapi_extra=request_body(WatchChanges)
)
async def change(request: Request, watch_id: str, resources: ResourcesDep) -> WatchInfo:
    """Renew a watch and replace the fields that are in the body.

    An empty body, `{}`, only renews the watch.
    """
    service, watches, client = resources.service, resources.watches, request.state.client
    async with service.admitted(request.state.limit_key) as progress:
        body = await _read(request, WatchChanges, progress, service)
        with _as_api_errors():
            before = await watches.get(client, watch_id)
            fields = await _changed_fields(service, before, body)
            return await _described(service, await watches.change(client, watch_id, fields))


@router.delete("/v1/watches/{watch_id}", status_code=204, responses=_some(404, 422, 503))
async def remove(request: Request, watch_id: str, resources: ResourcesDep) -> None:
    """Delete a watch."""
    with _as_api_errors():
        await resources.watches.remove(request.state.client, watch_id)


@router.get(
    "/v1/watches/{watch_id}/hits",
    response_class=NdjsonSchema,
    responses={
        200: {"model": ListenLine, "description": "one line per hit"},
        **error_responses(404, 422, 429, 503),
    },
)
@facts(streams=True)
async def hits(
    request: Request,
    watch_id: str,
    parameters: Annotated[ListenParameters, Query()],
    resources: ResourcesDep,
    limit: LimitDep,
) -> Response:
    """Stream the hits of a watch as they occur, regardless of which client sends the frames.

    To resume without missing a hit, pass the cursor of the last hit that you have processed.
    """
    resources.release()

    async def work(request: Request, out: LinesOut) -> None:
        async def disconnected() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        async def write(line: str) -> None:
            if not out.is_started:
                await out.start()
            await out.line(line)

        with limit.slot(request.state.limit_key), _as_api_errors():
            listening = _listening(resources, request, watch_id, parameters.after, write)
            await until_disconnect(disconnected, listening)

    return NdjsonAnswer(work, idle_seconds=_SEND_SECONDS)


@router.websocket("/v1/watches/{watch_id}/live")
@facts(streams=True)
async def live(socket: WebSocket, watch_id: str, resources: ResourcesDep, limit: LimitDep) -> None:
    """Stream the hits of a watch as WebSocket text messages."""
    config = resources.service.config
    resources.release()

    async def work(out: MessagesOut) -> None:
        given = dict(socket.query_params)
        after = validated(ListenParameters, given, "invalid_parameter").after
        with limit.slot(socket.state.limit_key), _as_api_errors():
            listening = _listening(resources, socket, watch_id, after, out.line)
            await until_disconnect(lambda: wait_for_close(socket), listening)

    await answer_socket(socket, config, _SEND_SECONDS, work)


def _listening(
    resources: Resources,
    connection: HTTPConnection,
    watch_id: str,
    after: int | None,
    write: Callable[[str], Awaitable[None]],
) -> Coroutine[Any, Any, None]:
    client = Client(connection.state.client, connection.state.limit_key)
    on_dropped = resources.feeds.counts.count_lost_hits
    return listen_to(resources.watches, client, watch_id, after, write, on_dropped)


async def _read(request: Request, model: type[T], progress: InProgress, service: Service) -> T:
    """Read and parse a JSON body. The media type must be JSON, because cross-origin pages cannot
    send JSON without a CORS preflight. Raises ApiError."""
    kind, _ = content_type(request.headers)
    if kind != "application/json":
        message = f"Content-Type {kind[:80]!r} is not supported. Send application/json"
        raise ApiError(415, "unknown_content_type", message)
    raw = await read_body(request, _MAX_BODY_BYTES, service, progress)
    found: T = await service.parsed(_parsed, raw, model)
    return found


def _parsed(raw: bytes, model: type[T]) -> T:
    return validated(model, parse_json(raw), "invalid_watch")


async def _terms(service: Service, body: WatchBody) -> Terms:
    return Terms(
        classes=await _checked_names(service, body.classes, body.recall, body.threshold),
        recall=body.recall,
        threshold=body.threshold,
        ttl_seconds=_checked_ttl(service, body.ttl_seconds),
        feeds=tuple(body.feeds or ()),
        label=body.label,
        webhook=_checked_webhook(service, body.webhook),
    )


async def _checked_names(
    service: Service,
    classes: Sequence[str | int],
    recall: float | None,
    threshold: float | None,
) -> tuple[str, ...]:
    """Return the names of `classes`, without duplicates. Raises ApiError if a class is unknown or
    does not have a threshold."""
    check_class_count(len(classes), service.config.max_classes)
    query = await service.make_query(classes, recall, threshold)
    return await service.in_thread(_decided_names, service, query)


def _decided_names(service: Service, query: ClassQuery) -> tuple[str, ...]:
    bundle, names = service.model.bundle, dict[str, None]()
    for class_id in query.class_ids:
        name = bundle.names.names[class_id]
        if threshold_of(bundle, class_id, query).threshold is None:
            message = (
                f"class {name!r} does not have a threshold for this recall. Set threshold instead"
            )
            raise ApiError(422, "no_threshold", message)
        names[name] = None
    return tuple(names)


def _checked_ttl(service: Service, seconds: float) -> float:
    least, most = service.config.min_watch_ttl_seconds, service.config.max_watch_ttl_seconds
    if not least <= seconds <= most:
        message = f"ttl_seconds is {seconds:g}. Set it to a value from {least:g} to {most:g}"
        raise ApiError(422, "invalid_watch", message)
    return seconds


def _checked_webhook(service: Service, webhook: Webhook | None) -> Webhook | None:
    if webhook is None:
        return None
    try:
        return webhook.check_allowed(service.config.webhook_hosts)
    except ValueError as error:
        raise ApiError(422, "webhook_not_allowed", str(error)) from error


async def _changed_fields(service: Service, before: Watch, body: WatchChanges) -> dict[str, object]:
    """Return the terms to replace. Recall and threshold are mutually exclusive: setting one removes
    the other."""
    sent = body.model_fields_set
    fields: dict[str, object] = {}
    recall, threshold = before.recall, before.threshold
    if body.recall is not None or body.threshold is not None:
        recall, threshold = body.recall, body.threshold
        fields |= {"recall": recall, "threshold": threshold}
    if body.classes is not None or fields:
        classes = before.classes if body.classes is None else body.classes
        fields["classes"] = await _checked_names(service, classes, recall, threshold)
    if body.ttl_seconds is not None:
        fields["ttl_seconds"] = _checked_ttl(service, body.ttl_seconds)
    if "feeds" in sent:
        fields["feeds"] = tuple(body.feeds or ())
    if "label" in sent:
        fields["label"] = body.label
    if "webhook" in sent:
        fields["webhook"] = _checked_webhook(service, body.webhook)
    return fields


async def _described(service: Service, watch: Watch) -> WatchInfo:
    found: WatchInfo = await service.in_thread(_describe, service, watch)
    return found


def _describe(service: Service, watch: Watch) -> WatchInfo:
    found = {name: _describe_class(service, watch, name) for name in watch.classes}
    classes = [described for described in found.values() if described is not None]
    return WatchInfo(
        **watch.model_dump(include={"id", "label", "recall", "threshold", "ttl_seconds"}),
        classes=classes,
        missing_classes=[name for name, described in found.items() if described is None],
        drift=_drift(service, classes),
        feeds=list(watch.feeds),
        created_at=datetime.fromtimestamp(watch.created_at, UTC),
        expires_at=datetime.fromtimestamp(watch.expires_at, UTC),
        webhook=_describe_webhook(watch),
    )


def _describe_webhook(watch: Watch) -> WebhookInfo | None:
    webhook, delivery = watch.webhook, watch.delivery
    if webhook is None or delivery is None:
        return None
    is_signed = webhook.secret is not None
    return WebhookInfo(url=webhook.url, is_signed=is_signed, **delivery.model_dump())


def _drift(service: Service, classes: Sequence[ClassThreshold]) -> list[ClassDrift]:
    if service.drift is None:
        return []
    found = [
        service.drift.of(one.class_id, one.threshold)
        for one in classes
        if one.threshold is not None
    ]
    return [one for one in found if one is not None]


def _describe_class(service: Service, watch: Watch, name: str) -> ClassThreshold | None:
    """Return None if this version of the model does not have the class or a threshold for it."""
    bundle = service.model.bundle
    try:
        class_id = bundle.names.id_of_name(name)
        query = ClassQuery((class_id,), watch.recall, watch.threshold)
        described = threshold_of(bundle, class_id, query)
    except ValueError:
        return None
    return None if described.threshold is None else described


@contextmanager
def _as_api_errors() -> Iterator[None]:
    """Convert errors about watches to ApiErrors."""
    try:
        yield
    except UnknownWatchError as error:
        raise ApiError(404, "unknown_watch", str(error)) from error
    except NoWatchesError as error:
        raise ApiError(404, "no_watches", str(error)) from error
    except UnknownCursorError as error:
        raise ApiError(422, "invalid_parameter", str(error)) from error
    except ListenerLimitError as error:
        raise ApiError(429, "too_many_listeners", str(error), {"Retry-After": "10"}) from error
    except WatchLimitError as error:
        raise ApiError(429, "too_many_watches", str(error), {"Retry-After": "10"}) from error
    except UnknownListenerError as error:
        message = f"{error}. Reconnect the listener"
        raise ApiError(503, "listener_lost", message, RETRY) from error
    except WatchesDownError as error:
        raise watches_down(error) from error
