"""`/v1/galleries`: search indexed collections for any class, and return thumbnails."""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from serving.api_error import ApiError, validated
from serving.galleries.gallery import Galleries, Gallery
from serving.http.error_responses import ERROR_RESPONSES
from serving.http.openapi import request_body
from serving.http.query_body import RECALL_MEANING, check_class_count, max_values
from serving.http.request_body import parse_json, read_body
from serving.http.routing import ResourcesDep
from serving.schemas import ErrorBody, GalleryFound, GalleryList, Hits
from serving.service import InProgress, Service

_MAX_LIMIT = 1000
# Limit on the total number of hits in one response. A response with this many hits is about 2 MB.
_MAX_HITS = 10_000


class SearchBody(BaseModel):
    """Which items of a gallery belong to these classes?"""

    model_config = ConfigDict(extra="forbid")

    classes: Annotated[list[StrictStr | StrictInt], Field(fail_fast=True)] = Field(
        min_length=1, description="class names or ids"
    )
    recall: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description=RECALL_MEANING)
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        None,
        description="return only items with at least this score; cannot be combined with recall",
    )
    limit: int = Field(
        20, ge=1, le=_MAX_LIMIT, description="maximum number of hits per class on a page"
    )
    offset: int = Field(0, ge=0, le=2**62, description="number of hits to skip per class")


router = APIRouter()


@router.get("/v1/galleries")
async def listed(resources: ResourcesDep) -> GalleryList:
    """List the galleries on this server."""
    galleries = resources.galleries
    return GalleryList(galleries=[_describe(name, galleries[name]) for name in galleries.names()])


@router.post(
    "/v1/galleries/{name}/search", responses=ERROR_RESPONSES, openapi_extra=request_body(SearchBody)
)
async def search(name: str, request: Request, resources: ResourcesDep) -> Hits:
    """Search a gallery for classes.

    Returns one page of items per class, in descending order of score.
    """
    service, galleries = resources.service, resources.galleries
    async with service.admitted(request.state.limit_key) as progress:
        _named(galleries, name)
        body = await _read(request, service, progress)
        query = await service.make_query(body.classes, body.recall, body.threshold)
        found: Hits = await service.in_thread(
            lambda: galleries.search(name, query, offset=body.offset, limit=body.limit)
        )
        return found


@router.get(
    "/v1/galleries/{name}/items/{index}/thumbnail",
    response_class=Response,
    responses={
        200: {"content": {"image/jpeg": {}}, "description": "thumbnail (JPEG)"},
        **{status: {"model": ErrorBody} for status in (404, 422)},
    },
)
async def thumbnail(
    name: str, index: Annotated[int, Path(ge=0)], resources: ResourcesDep
) -> Response:
    """Return a thumbnail of an item."""
    gallery = _named(resources.galleries, name)
    try:
        small = await resources.service.in_thread(gallery.thumbnail, index)
    except IndexError as error:
        raise ApiError(404, "unknown_item", str(error)) from error
    if not small:
        raise ApiError(
            404,
            "no_thumbnail",
            f"gallery {name} was indexed without thumbnails. Index it again with thumbnails",
        )
    return Response(small, media_type="image/jpeg", headers={"X-Content-Type-Options": "nosniff"})


def _describe(name: str, gallery: Gallery) -> GalleryFound:
    info = gallery.info
    return GalleryFound(
        name=name, num_items=info.num_items, reads=info.reads, thumbnails=info.thumbnails
    )


def _named(galleries: Galleries, name: str) -> Gallery:
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
    check_class_count(len(body.classes), service.config.max_classes)
    if len(body.classes) * body.limit > _MAX_HITS:
        raise ApiError(
            422,
            "invalid_query",
            f"{len(body.classes)} classes with limit {body.limit} can return more than "
            f"{_MAX_HITS} hits. Reduce the number of classes or the limit",
        )
    return body


def _parsed(raw: bytes, most: int) -> SearchBody:
    return validated(SearchBody, parse_json(raw, most), "invalid_query")
