"""`/v1/galleries`: list and search indexed collections, and return thumbnails of their items."""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import ConfigDict, Field

from data.messages import one_line
from serving.answer import Rule
from serving.api_error import ApiError
from serving.galleries.gallery import Gallery
from serving.galleries.searching import Galleries, Page
from serving.http.entry import VersionDep
from serving.http.error_responses import ERROR_RESPONSES
from serving.http.openapi import request_body
from serving.http.query_body import ClassesBody
from serving.http.request_body import parse_json, read_body
from serving.limits import check_count
from serving.schemas import ErrorBody, GalleryFound, GalleryIndex, GalleryList, Hits
from serving.versions import Version

_MAX_LIMIT = 1000
# Limit on the total number of hits in one response. A response with this many hits is about 2 MB.
_MAX_HITS = 10_000
_INDEX_OR_ID = r"^[0-9]{1,30}(\.[0-9a-f]{8})?$"


class SearchBody(ClassesBody, Rule):
    """Which items of a gallery belong to these classes? With a recall or threshold, only those that
    reach it are returned."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(
        20,
        ge=1,
        le=_MAX_LIMIT,
        description="maximum number of hits per class on a page",
    )
    offset: int = Field(0, ge=0, le=2**62, description="number of hits to skip per class")
    exact: bool | None = Field(
        None,
        description="true: score all items. false: use the gallery's index, if there is one, which "
        "finds at most 100 hits. Default: use it if its recall is at least 0.95 and offset + limit "
        "is at most 100",
    )


router = APIRouter()


@router.get("/v1/galleries")
async def listed(version: VersionDep) -> GalleryList:
    """List the galleries on this server."""
    galleries = version.galleries
    names = sorted({*galleries.available, *galleries.unavailable})
    return GalleryList(galleries=[_describe(name, version) for name in names])


@router.post(
    "/v1/galleries/{name}/search",
    responses=ERROR_RESPONSES,
    openapi_extra=request_body(SearchBody),
)
async def search(name: str, request: Request, version: VersionDep) -> Hits:
    """Search a gallery for classes.

    Returns one page of items per class, in descending order of score.
    """
    service, galleries = version.service, version.galleries
    async with service.admitted(request.state.client) as progress:
        _named(galleries, name)
        raw = await read_body(request, service, progress)
        if not raw.strip():
            raise ApiError(400, "empty_body", 'the body is empty. Send {"classes": […]}')
        given = SearchBody, raw, service.config, "invalid_query"
        body: SearchBody = await service.in_thread(parse_json, *given)
        check_count(len(body.classes), "classes", service.config.max_classes)
        if len(body.classes) * body.limit > _MAX_HITS:
            raise ApiError(
                422,
                "invalid_query",
                f"{len(body.classes)} classes with limit {body.limit} can return more than "
                f"{_MAX_HITS} hits. Reduce their number or the limit",
            )
        query = await service.make_query(body.classes, body)
        page = Page(body.offset, body.limit, body.exact)
        found: Hits = await service.in_thread(galleries.search, name, query, page)
        return found


@router.get(
    "/v1/galleries/{name}/items/{item}/thumbnail",
    response_class=Response,
    responses={
        200: {"content": {"image/jpeg": {}}, "description": "thumbnail (JPEG)"},
        404: {"model": ErrorBody},
        422: {"model": ErrorBody},
        503: {"model": ErrorBody},
    },
)
async def thumbnail(
    name: str,
    item: Annotated[str, Path(pattern=_INDEX_OR_ID, description="index or id of the item")],
    version: VersionDep,
) -> Response:
    """Return a thumbnail of an item."""
    gallery = _named(version.galleries, name)
    index = gallery.index_of(item)
    if index is None:
        raise ApiError(
            404,
            "unknown_item",
            f"the gallery does not contain the item {item!r}. Search again: the gallery may have "
            "been built again",
        )
    small = await version.service.in_thread(gallery.thumbnail, index)
    if not small:
        raise ApiError(
            404,
            "no_thumbnail",
            f"gallery {name} was indexed without thumbnails. Index it again with thumbnails",
        )
    return Response(small, media_type="image/jpeg", headers={"X-Content-Type-Options": "nosniff"})


def _describe(name: str, version: Version) -> GalleryFound:
    gallery, error = version.galleries.available.get(name), version.galleries.unavailable.get(name)
    index = gallery and gallery.info.index
    return GalleryFound(
        name=name,
        unavailable=error and one_line(error),
        num_items=gallery.num_items if gallery else 0,
        reads=version.service.model.reads,
        thumbnails=gallery is not None and gallery.info.thumbnails,
        index=index and GalleryIndex.model_validate(index, from_attributes=True),
    )


def _named(galleries: Galleries, name: str) -> Gallery:
    """Look up a gallery in the server's configuration. The name is never used as a path."""
    if name in galleries.unavailable:
        reason = one_line(galleries.unavailable[name])
        raise ApiError(503, "gallery_unavailable", f"gallery {name} is unavailable: {reason}")
    if name not in galleries.available:
        known = sorted({*galleries.available, *galleries.unavailable})
        shown = ", ".join(known) or "none (start the server with --gallery NAME=FOLDER)"
        message = f"unknown gallery {name[:80]!r}. Galleries on this server: {shown}"
        raise ApiError(404, "unknown_gallery", message)
    return galleries.available[name]
