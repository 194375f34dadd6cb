"""`/v1/galleries`: search indexed collections, return thumbnails, and insert and delete items."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Self

import numpy as np
from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, model_validator
from torch import Tensor

from serving.api_error import ApiError, validated
from serving.galleries.changes import (
    GalleryFullError,
    InsertedItem,
    NameInUseError,
    UnknownItemError,
)
from serving.galleries.collection import shown_text
from serving.galleries.live import LiveGallery, Snapshot
from serving.galleries.searching import Galleries, Page
from serving.galleries.thumbnails import thumbnail as thumbnail_of
from serving.http.error_responses import ERROR_RESPONSES
from serving.http.openapi import request_body
from serving.http.query_body import (
    RECALL_MEANING,
    InputsBody,
    check_class_count,
    max_values,
    read_json_inputs,
)
from serving.http.request_body import parse_json, read_body
from serving.http.routing import ResourcesDep
from serving.schemas import (
    ErrorBody,
    GalleryFound,
    GalleryIndex,
    GalleryItem,
    GalleryList,
    Hits,
    InsertedItems,
)
from serving.service import InProgress, Service
from serving.watches.watch import WatchesDownError

_MAX_LIMIT = 1000
# Limit on the total number of hits in one response. A response with this many hits is about 2 MB.
_MAX_HITS = 10_000
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (404, 422, 503)
}
# The index or id of an item of the gallery's files, or the id of an inserted item.
_FILE_ID, _INSERTED_ID = r"\d{1,18}\.[0-9a-f]{8}", r"new\.[0-9a-f]{16}"
ItemId = Annotated[
    str, Path(pattern=f"^({_FILE_ID}|{_INSERTED_ID})$", description="id of the item")
]
ItemIndexOrId = Annotated[
    str,
    Path(pattern=rf"^(\d{{1,30}}|{_FILE_ID}|{_INSERTED_ID})$", description="index or id"),
]
_NAME = Annotated[StrictStr, Field(min_length=1, max_length=1000)]


class SearchBody(BaseModel):
    """Which items of a gallery belong to these classes, or are similar to these items?"""

    model_config = ConfigDict(extra="forbid")

    classes: Annotated[list[StrictStr | StrictInt], Field(fail_fast=True)] | None = Field(
        None, min_length=1, description="class names or ids"
    )
    examples: Annotated[list[StrictStr], Field(fail_fast=True)] | None = Field(
        None, min_length=1, description="ids of items of the gallery, instead of `classes`"
    )
    recall: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description=RECALL_MEANING)
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        None,
        description="return only items with at least this score; cannot be combined with recall",
    )
    limit: int = Field(
        20,
        ge=1,
        le=_MAX_LIMIT,
        description="maximum number of hits per class or example on a page",
    )
    offset: int = Field(
        0, ge=0, le=2**62, description="number of hits to skip per class or example"
    )
    exact: bool | None = Field(
        None,
        description="true: score all items. false: use the gallery's index, if there is one, which "
        "finds at most 100 hits. Default: use it if its recall is at least 0.95 and offset + limit "
        "is at most 100",
    )

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.classes is None) == (self.examples is None):
            raise ValueError("set exactly one of `classes` and `examples`")
        if self.examples is not None and self.recall is not None:
            raise ValueError("`recall` requires `classes`. Set `threshold` instead")
        return self

    @property
    def page(self) -> Page:
        return Page(self.offset, self.limit, self.exact)


class InsertBody(InputsBody):
    """Images or texts to insert into a gallery."""

    names: Annotated[list[_NAME], Field(fail_fast=True)] | None = Field(
        None,
        description="one unique name per input, such as its path in the collection (default: the "
        "id of the item)",
    )


router = APIRouter()


@router.get("/v1/galleries", responses={503: {"model": ErrorBody}})
async def listed(resources: ResourcesDep) -> GalleryList:
    """List the galleries on this server."""
    galleries = resources.galleries
    with _as_api_errors():
        found = [_describe(name, await galleries[name].refresh()) for name in galleries.names()]
    return GalleryList(galleries=found)


@router.post(
    "/v1/galleries/{name}/search", responses=ERROR_RESPONSES, openapi_extra=request_body(SearchBody)
)
async def search(name: str, request: Request, resources: ResourcesDep) -> Hits:
    """Search a gallery for classes, or for items that are similar to some of its items.

    Returns one page of items per class or example, in descending order of score.
    """
    service, galleries = resources.service, resources.galleries
    async with service.admitted() as progress:
        gallery = _named(galleries, name)
        body = await _read(request, service, progress)
        with _as_api_errors():
            await gallery.refresh()
            if body.examples is not None:
                work = partial(
                    galleries.search_similar, name, body.examples, body.threshold, body.page
                )
            else:
                query = await service.make_query(body.classes or [], body.recall, body.threshold)
                work = partial(galleries.search, name, query, body.page)
            found: Hits = await service.in_thread(work)
        return found


@router.post(
    "/v1/galleries/{name}/items",
    status_code=201,
    responses={**ERROR_RESPONSES, 409: {"model": ErrorBody}},
    openapi_extra=request_body(InsertBody),
)
async def insert(name: str, request: Request, resources: ResourcesDep) -> InsertedItems:
    """Insert images or texts into a gallery, all or none.

    Once the request has been answered, the items survive a restart and are found by every search.
    """
    service = resources.service
    async with service.admitted() as progress:
        gallery = _named(resources.galleries, name)
        body, inputs = await read_json_inputs(request, InsertBody, service, progress)
        names = _checked_names(body.names, len(inputs))
        features = await service.computed(inputs, lambda features: features)
        items = await service.in_thread(_new_items, service, gallery, inputs, names, features)
        with _as_api_errors():
            await gallery.insert(items)
        progress.inputs = len(items)
    shown = [GalleryItem(id=one.id, item=None, name=one.name, text=one.text) for one in items]
    return InsertedItems(items=shown)


@router.delete(
    "/v1/galleries/{name}/items/{item}",
    status_code=204,
    responses={**_ERRORS, 409: {"model": ErrorBody}},
)
async def delete(name: str, item: ItemId, resources: ResourcesDep) -> None:
    """Delete an item from a gallery. The collection does not change."""
    gallery = _named(resources.galleries, name)
    with _as_api_errors():
        await gallery.delete(item)


@router.get(
    "/v1/galleries/{name}/items/{item}/thumbnail",
    response_class=Response,
    responses={
        200: {"content": {"image/jpeg": {}}, "description": "thumbnail (JPEG)"},
        **_ERRORS,
    },
)
async def thumbnail(name: str, item: ItemIndexOrId, resources: ResourcesDep) -> Response:
    """Return a thumbnail of an item."""
    gallery = _named(resources.galleries, name)
    with _as_api_errors():
        small = await gallery.thumbnail(item)
    if not small:
        raise ApiError(
            404,
            "no_thumbnail",
            f"gallery {name} was indexed without thumbnails. Index it again with thumbnails",
        )
    return Response(small, media_type="image/jpeg", headers={"X-Content-Type-Options": "nosniff"})


def _describe(name: str, snapshot: Snapshot) -> GalleryFound:
    info = snapshot.base.info
    index = None
    if info.index is not None:
        index = GalleryIndex(
            is_default=info.index.is_default,
            num_queries=info.index.num_queries,
            recall=info.index.recall,
        )
    return GalleryFound(
        name=name,
        num_items=snapshot.num_items,
        inserted=len(snapshot.inserted),
        deleted=len(snapshot.deleted),
        reads=info.reads,
        thumbnails=info.thumbnails,
        index=index,
    )


def _named(galleries: Galleries, name: str) -> LiveGallery:
    """Look up a gallery in the server's configuration. The name is never used as a path."""
    try:
        return galleries[name]
    except KeyError as error:
        known = ", ".join(galleries.names()) or "none (start the server with --gallery NAME=FOLDER)"
        raise ApiError(
            404,
            "unknown_gallery",
            f"unknown gallery {name[:80]!r}. Galleries on this server: {known}",
        ) from error


async def _read(request: Request, service: Service, progress: InProgress) -> SearchBody:
    raw = await read_body(request, service.config.max_body_bytes, service, progress)
    if not raw.strip():
        raise ApiError(400, "empty_body", 'the body is empty. Send {"classes": […]}')
    body: SearchBody = await service.in_thread(_parsed, raw, max_values(service.config))
    targets = body.classes or body.examples or []
    check_class_count(len(targets), service.config.max_classes)
    if len(targets) * body.limit > _MAX_HITS:
        raise ApiError(
            422,
            "invalid_query",
            f"{len(targets)} classes or examples with limit {body.limit} can return more than "
            f"{_MAX_HITS} hits. Reduce their number or the limit",
        )
    return body


def _parsed(raw: bytes, most: int) -> SearchBody:
    return validated(SearchBody, parse_json(raw, most), "invalid_query")


def _checked_names(names: list[str] | None, count: int) -> list[str] | None:
    if names is not None and len(names) != count:
        raise ApiError(
            422, "invalid_query", f"names has {len(names)} names for {count} inputs. Send one each"
        )
    return names


def _new_items(
    service: Service,
    gallery: LiveGallery,
    inputs: Sequence[bytes | str],
    names: list[str] | None,
    features: Tensor,
) -> list[InsertedItem]:
    """Return the items to insert. Raises ApiError if the features of an input are not finite."""
    rows = features.numpy().astype("<f4", copy=False)
    ids = [f"new.{secrets.token_hex(8)}" for _ in inputs]
    items = []
    for position, (item_id, raw, row) in enumerate(zip(ids, inputs, rows, strict=True)):
        if not np.isfinite(row).all():
            message = f"{service.model.reads}[{position}]: the features computed are not finite"
            raise ApiError(422, "invalid_query", message)
        small = b""
        if gallery.base.info.thumbnails and isinstance(raw, bytes):
            small = thumbnail_of(raw, service.config.max_pixels)
        text = shown_text(raw) if isinstance(raw, str) else None
        name = item_id if names is None else names[position]
        items.append(InsertedItem(item_id, name, text, row.tobytes(), small))
    return items


@contextmanager
def _as_api_errors() -> Iterator[None]:
    """Convert errors about galleries to ApiErrors."""
    try:
        yield
    except UnknownItemError as error:
        raise ApiError(404, "unknown_item", str(error)) from error
    except NameInUseError as error:
        raise ApiError(409, "name_in_use", str(error)) from error
    except GalleryFullError as error:
        raise ApiError(409, "gallery_full", str(error)) from error
    except WatchesDownError as error:
        raise ApiError(503, "watches_down", str(error), {"Retry-After": "1"}) from error
