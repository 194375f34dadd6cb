"""`/v1/galleries/{name}/items`: insert and delete items of a gallery, and return thumbnails."""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path, Request, Response
from pydantic import Field, StrictStr
from torch import Tensor

from serving.api_error import ApiError
from serving.galleries.changes import InsertedItem
from serving.galleries.collection import shown_text
from serving.galleries.live import LiveGallery
from serving.galleries.thumbnails import thumbnail as thumbnail_of
from serving.http.error_responses import ERROR_RESPONSES
from serving.http.openapi import request_body
from serving.http.query_body import InputsBody, read_json_inputs
from serving.http.routes.galleries import as_api_errors, named
from serving.http.routing import ResourcesDep
from serving.schemas import ErrorBody, GalleryItem, InsertedItems
from serving.service import Service

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


class InsertBody(InputsBody):
    """Images or texts to insert into a gallery."""

    names: Annotated[list[_NAME], Field(fail_fast=True)] | None = Field(
        None,
        description="one unique name per input, such as its path in the collection (default: the "
        "id of the item)",
    )


router = APIRouter()


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
    async with service.admitted(request.state.limit_key) as progress:
        gallery = named(resources.galleries, name)
        body, inputs = await read_json_inputs(request, InsertBody, service, progress)
        names = _checked_names(body.names, len(inputs))
        features = await service.computed(inputs, lambda features: features)
        items = await service.in_thread(_new_items, service, gallery, inputs, names, features)
        with as_api_errors():
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
    gallery = named(resources.galleries, name)
    with as_api_errors():
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
    gallery = named(resources.galleries, name)
    with as_api_errors():
        small = await gallery.thumbnail(item)
    if not small:
        raise ApiError(
            404,
            "no_thumbnail",
            f"gallery {name} was indexed without thumbnails. Index it again with thumbnails",
        )
    return Response(small, media_type="image/jpeg", headers={"X-Content-Type-Options": "nosniff"})


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
