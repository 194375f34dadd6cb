"""Properties that routes declare, and dependencies of route functions.

Access and retries are properties of a route, declared with `@facts` where the route is defined.
Token checks, the OpenAPI document and HAProxy's rules are derived from them.

    @router.post("/v1/query")
    @facts(is_idempotent=True)
    async def query(request: Request, service: ServiceDep) -> Answer: ...
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute
from starlette.requests import Request

from serving.models.served import ServedModel, Version
from serving.service import Service

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True)
class RouteFacts:
    """Properties of a route that affect access and retries.

    - `needs_token`: False only for a route that reveals nothing about the model and has no path
      parameters.
    - `is_idempotent`: repeating the request does not change the result. If a replica fails before
      it responds, HAProxy sends the request to another replica. GET and HEAD requests are always
      idempotent.
    """

    needs_token: bool = True
    is_idempotent: bool = False


def facts(
    *, needs_token: bool = True, is_idempotent: bool = False
) -> Callable[[Endpoint], Endpoint]:
    """Declare the `RouteFacts` of a route function. Place it below the route decorator."""

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.facts = RouteFacts(  # type: ignore[attr-defined]
            needs_token=needs_token, is_idempotent=is_idempotent
        )
        return endpoint

    return declare


def paths_of(
    routers: Iterable[APIRouter], condition: Callable[[RouteFacts], bool]
) -> tuple[str, ...]:
    """Return the paths, such as `/v1/galleries/{name}/search`, of the routes whose facts satisfy
    `condition`."""
    found = (route.path for route in _routes(routers) if condition(_facts_of(route)))
    return tuple(dict.fromkeys(found))


def _routes(routers: Iterable[APIRouter]) -> Iterator[APIRoute]:
    for router in routers:
        for route in router.routes:
            assert isinstance(route, APIRoute), f"{router} has {route}, which is not an API route"
            yield route


def _facts_of(route: APIRoute) -> RouteFacts:
    return getattr(route.endpoint, "facts", RouteFacts())


# Dependencies are coroutines, because FastAPI runs plain functions in a thread.
async def _model(request: Request) -> ServedModel:
    found: ServedModel = request.app.state.model
    return found


async def _version(request: Request) -> Version:
    found: Version = request.state.version
    return found


async def _service(request: Request) -> Service:
    found: Version = request.state.version
    return found.service


ModelDep = Annotated[ServedModel, Depends(_model)]
VersionDep = Annotated[Version, Depends(_version)]
ServiceDep = Annotated[Service, Depends(_service)]
