"""What a route declares about itself besides its path, and what its function may ask for.

A route's access, retries and buffering are facts of the route: `@facts` states them where the route
is defined. Token checks, the OpenAPI document and HAProxy's rules are derived from them.

    @router.post("/v1/query")
    @facts(is_idempotent=True)
    async def query(request: Request, service: ServiceDep) -> Answer: ...
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.requests import HTTPConnection

from serving.galleries.gallery import Galleries
from serving.service import Service
from serving.watches.feed import Feeds
from serving.watches.watch import Watches

T = TypeVar("T")
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Route = APIRoute | APIWebSocketRoute


@dataclass(frozen=True)
class RouteFacts:
    """What the server needs to know of a route.

    - `needs_token`: False only for a route that reveals nothing about the model; its path has no
      parameters.
    - `streams`: the body may arrive, or the answer be written, for as long as the client likes.
      HAProxy then applies no time limit or size limit: the route must apply its own.
    - `is_idempotent`: repeating the request has no further effect. HAProxy sends it to another
      replica if one fails before it answers. Always true for GET and HEAD.
    """

    needs_token: bool = True
    streams: bool = False
    is_idempotent: bool = False


def facts(
    *, needs_token: bool = True, streams: bool = False, is_idempotent: bool = False
) -> Callable[[Endpoint], Endpoint]:
    """Declare the `RouteFacts` of a route's function. Place it below the route's own decorator."""

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.facts = RouteFacts(  # type: ignore[attr-defined]
            needs_token=needs_token, streams=streams, is_idempotent=is_idempotent
        )
        return endpoint

    return declare


def paths_of(
    routers: Iterable[APIRouter], condition: Callable[[RouteFacts], bool]
) -> tuple[str, ...]:
    """The paths, such as `/v1/feeds/{feed}`, of the routes whose facts fulfill `condition`."""
    found = (route.path for route in _routes(routers) if condition(_facts_of(route)))
    return tuple(dict.fromkeys(found))


def _routes(routers: Iterable[APIRouter]) -> Iterator[Route]:
    for router in routers:
        for route in router.routes:
            assert isinstance(route, Route), f"{router} has {route}, which states no facts"
            yield route


def _facts_of(route: Route) -> RouteFacts:
    return getattr(route.endpoint, "facts", RouteFacts())


@dataclass(frozen=True)
class Resources:
    """What the routes of one application share. `metrics` returns the page at /metrics."""

    service: Service
    watches: Watches
    feeds: Feeds
    galleries: Galleries
    metrics: Callable[[], Awaitable[bytes]]
    _made: dict[object, Any] = field(default_factory=dict, init=False)

    def install(self, api: FastAPI) -> None:
        """Pass these to the routes of `api`."""
        api.state.resources = self

    def once(self, make: Callable[["Resources"], T]) -> T:
        """What `make` returned for these resources at the first call."""
        if make not in self._made:
            self._made[make] = make(self)
        found: T = self._made[make]
        return found


# Dependencies are coroutines: FastAPI runs plain functions in a thread.
async def _resources(connection: HTTPConnection) -> Resources:
    found: Resources = connection.app.state.resources
    return found


async def _service(connection: HTTPConnection) -> Service:
    return (await _resources(connection)).service


ResourcesDep = Annotated[Resources, Depends(_resources)]
ServiceDep = Annotated[Service, Depends(_service)]


def per_application(make: Callable[[Resources], T]) -> Callable[[HTTPConnection], Awaitable[T]]:
    """A dependency that each application makes once, at its first use.

    For what belongs to one module of routes, such as a limit on how many clients it serves at once.
    """

    async def get(connection: HTTPConnection) -> T:
        return (await _resources(connection)).once(make)

    return get
