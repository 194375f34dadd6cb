"""`GET /v1/classes`: the classes of the model, searched by name."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from serving.http.entry import ServiceDep
from serving.limits import ClientLimit
from serving.schemas import ClassFound, ClassPage, ErrorBody
from serving.service import Service

# Limit on running and waiting searches; further searches are rejected with status 429.
_MAX_SEARCHES, _MAX_SEARCHES_PER_CLIENT = 32, 16


class ClassSearch(BaseModel):
    """Search parameters. Unknown parameters are rejected, not ignored."""

    model_config = ConfigDict(extra="forbid")

    search: str = Field(
        "", max_length=200, description="case-insensitive substring of the class name"
    )
    limit: int = Field(20, ge=1, le=1000, description="maximum number of classes per page")
    offset: int = Field(0, ge=0, description="number of classes to skip")


router = APIRouter()


class Searches:
    """Runs one search of a replica at a time in a separate thread, so that searches do not delay
    queries."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "search")
        self.limit = ClientLimit(_MAX_SEARCHES, "searches", per_client=_MAX_SEARCHES_PER_CLIENT)


@router.get(
    "/v1/classes",
    response_model=ClassPage,
    responses={status: {"model": ErrorBody} for status in (422, 429)},
)
async def classes(
    request: Request,
    parameters: Annotated[ClassSearch, Query()],
    service: ServiceDep,
) -> Response:
    """Search the classes by name.

    Names that begin with `search` are listed first.
    """
    searches: Searches = request.app.state.searches
    with searches.limit.slots(request.state.client):
        loop = asyncio.get_running_loop()
        page = await loop.run_in_executor(searches.thread, _page, service, parameters)
    return Response(page, media_type="application/json")


def _page(service: Service, parameters: ClassSearch) -> bytes:
    """Return a page of results as JSON. Call this in the search thread as well, because serializing
    a thousand classes takes a long time."""
    bundle = service.model.bundle
    found, total = bundle.classes.search(
        parameters.search, limit=parameters.limit, offset=parameters.offset
    )
    described = [
        ClassFound(
            id=class_id,
            **bundle.classes[class_id].model_dump(),
            positives=bundle.positives(class_id),
        )
        for class_id in found
    ]
    return ClassPage(total=total, classes=described).model_dump_json().encode()
