"""Routes that do not require a token, and dependencies of route functions."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute
from starlette.requests import Request

from serving.service import Service
from serving.versions import ServedModel, Version

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def without_token(endpoint: Endpoint) -> Endpoint:
    """Declare that a route does not require a token, because it reveals nothing about the model and
    has no path parameters. Place this below the route decorator."""
    endpoint.without_token = True  # type: ignore[attr-defined]
    return endpoint


def paths_without_token(routers: Iterable[APIRouter]) -> frozenset[str]:
    """Return the paths of the routes that are declared with `without_token`."""
    routes = [route for router in routers for route in router.routes]
    return frozenset(
        route.path
        for route in routes
        if isinstance(route, APIRoute) and getattr(route.endpoint, "without_token", False)
    )


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
