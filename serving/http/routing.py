"""Properties that routes declare, and dependencies of route functions.

Access, retries and buffering are properties of a route, declared with `@facts` where the route is
defined. Token checks, the OpenAPI document and HAProxy's rules are derived from them.

    @router.post("/v1/query")
    @facts(is_idempotent=True)
    async def query(request: Request, service: ServiceDep) -> Answer: ...
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.requests import HTTPConnection

from serving.galleries.searching import Galleries
from serving.models.models import Models, Version
from serving.models.reloading import Reloader
from serving.service import Service
from serving.tokens import Clients
from serving.watches.feed import Feeds
from serving.watches.watch import Watches

T = TypeVar("T")
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Route = APIRoute | APIWebSocketRoute
MODEL_PATHS = "/v1/models/{model}"


@dataclass(frozen=True)
class RouteFacts:
    """Properties of a route that affect access, retries and buffering.

    - `needs_token`: False only for a route that reveals nothing about the model or checks a token
      of its own, and has no path parameters.
    - `streams`: the client decides how long the body or the response takes. HAProxy does not apply
      a time or size limit to such a route, so the route must apply its own.
    - `is_idempotent`: repeating the request does not change the result. If a replica fails before
      it responds, HAProxy sends the request to another replica. GET and HEAD requests are always
      idempotent.
    """

    needs_token: bool = True
    streams: bool = False
    is_idempotent: bool = False


def facts(
    *, needs_token: bool = True, streams: bool = False, is_idempotent: bool = False
) -> Callable[[Endpoint], Endpoint]:
    """Declare the `RouteFacts` of a route function. Place it below the route decorator."""

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.facts = RouteFacts(  # type: ignore[attr-defined]
            needs_token=needs_token, streams=streams, is_idempotent=is_idempotent
        )
        return endpoint

    return declare


def paths_of(
    routers: Iterable[APIRouter], condition: Callable[[RouteFacts], bool]
) -> tuple[str, ...]:
    """Return the paths, such as `/v1/feeds/{feed}`, of the routes whose facts satisfy
    `condition`."""
    found = (route.path for route in _routes(routers) if condition(_facts_of(route)))
    return tuple(dict.fromkeys(found))


def _routes(routers: Iterable[APIRouter]) -> Iterator[Route]:
    for router in routers:
        for route in router.routes:
            assert isinstance(route, Route), f"{router} has {route}, which is not an API route"
            yield route


def _facts_of(route: Route) -> RouteFacts:
    return getattr(route.endpoint, "facts", RouteFacts())


def of_every_model(paths: Iterable[str]) -> tuple[str, ...]:
    """Return `paths` and, of those below /v1, also the paths for a model (`select_model.py`)."""
    return tuple(
        each
        for path in paths
        for each in ((path, MODEL_PATHS + path[3:]) if path.startswith("/v1/") else (path,))
    )


@dataclass(frozen=True)
class Admin:
    """Who may use /v1/admin, and what it controls."""

    clients: Clients
    reloader: Reloader


@dataclass(frozen=True)
class Shared:
    """Resources of an application that are the same for all models. `metrics` returns the page at
    /metrics. `admin` is None if the server has no tokens for administrators."""

    models: Models
    metrics: Callable[[], Awaitable[bytes]]
    admin: Admin | None
    made: dict[object, Any]


class Resources:
    """Resources of the routes during one request, for the model that the request is sent to."""

    def __init__(self, shared: Shared, version: Version, watches: Watches, feeds: Feeds) -> None:
        self.shared, self.watches, self.feeds = shared, watches, feeds
        self._version: Version | None = version

    @property
    def service(self) -> Service:
        return self.version.service

    @property
    def galleries(self) -> Galleries:
        return self.version.galleries

    @property
    def version(self) -> Version:
        """The version of the model that answers this request."""
        assert self._version is not None, "the version has been released"
        return self._version

    def release(self) -> None:
        """Allow the version to be freed before the request ends. Call this in a request that can
        last for days and does not use the version."""
        self._version = None

    def once(self, make: Callable[["Resources"], T]) -> T:
        """Return the result of `make`, which is called once per application."""
        made = self.shared.made
        if make not in made:
            made[make] = make(self)
        found: T = made[make]
        return found


# Dependencies are coroutines, because FastAPI runs plain functions in a thread.
async def _resources(connection: HTTPConnection) -> Resources:
    found: Resources = connection.state.resources
    return found


async def _service(connection: HTTPConnection) -> Service:
    return (await _resources(connection)).service


ResourcesDep = Annotated[Resources, Depends(_resources)]
ServiceDep = Annotated[Service, Depends(_service)]


def per_application(make: Callable[[Resources], T]) -> Callable[[HTTPConnection], Awaitable[T]]:
    """Return a dependency that is created once per application, on first use.

    Use it for state of a single route module, such as a limit on concurrent clients. It is shared
    by all models, so it must not refer to the service.
    """

    async def get(connection: HTTPConnection) -> T:
        return (await _resources(connection)).once(make)

    return get
