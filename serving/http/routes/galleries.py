"""`/v1/galleries`: list and search indexed collections."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, model_validator

from serving.api_error import ApiError, validated, watches_down
from serving.galleries.changes import (
    GalleryFullError,
    NameInUseError,
    UnknownItemError,
)
from serving.galleries.live import LiveGallery, Snapshot
from serving.galleries.searching import Galleries, Page
from serving.http.error_responses import ERROR_RESPONSES
from serving.http.openapi import request_body
from serving.http.query_body import (
    RECALL_MEANING,
    check_class_count,
    max_values,
)
from serving.http.request_body import parse_json, read_body
from serving.http.routing import ResourcesDep, facts
from serving.schemas import (
    ErrorBody,
    GalleryFound,
    GalleryIndex,
    GalleryList,
    Hits,
)
from serving.service import InProgress, Service
from serving.watches.watch import WatchesDownError

_MAX_LIMIT = 1000
# Limit on the total number of hits in one response. A response with this many hits is about 2 MB.
_MAX_HITS = 10_000


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


router = APIRouter()


@router.get("/v1/galleries", responses={503: {"model": ErrorBody}})
async def listed(resources: ResourcesDep) -> GalleryList:
    """List the galleries on this server."""
    galleries = resources.galleries
    with as_api_errors():
        found = [_describe(name, await galleries[name].refresh()) for name in galleries.names()]
    return GalleryList(galleries=found)


@router.post(
    "/v1/galleries/{name}/search", responses=ERROR_RESPONSES, openapi_extra=request_body(SearchBody)
)
@facts(is_idempotent=True)
async def search(name: str, request: Request, resources: ResourcesDep) -> Hits:
    """Search a gallery for classes, or for items that are similar to some of its items.

    Returns one page of items per class or example, in descending order of score.
    """
    service, galleries = resources.service, resources.galleries
    async with service.admitted(request.state.limit_key) as progress:
        gallery = named(galleries, name)
        body = await _read(request, service, progress)
        with as_api_errors():
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


def named(galleries: Galleries, name: str) -> LiveGallery:
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


@contextmanager
def as_api_errors() -> Iterator[None]:
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
        raise watches_down(error) from error
