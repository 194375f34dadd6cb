"""Passes HTTP requests from a replica's server straight to the application.

On its own path, Ray creates two tasks, several metrics and a copy of the headers for each request,
which take more CPU time than the answer of a small model. Ray still starts the server, chooses its
port, checks its health, replaces replicas and counts the requests in progress for autoscaling.
"""

import os

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api_error import too_many_requests
from serving.deploy.private_ray import ongoing_requests_of
from serving.http.error_responses import reject

# Ray calls the function named by this variable for the middlewares of each HTTP server that it
# starts. It wraps them around its own code, so the last one receives a request first.
MIDDLEWARES = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.middlewares"}


class _Application:
    """The application of the replica in this process, if there is one, and the maximum number of
    its requests in progress."""

    asgi: ASGIApp | None = None
    most = 0


def middlewares() -> list[Middleware]:
    return [Middleware(Ingress)]


def serve_directly(asgi: ASGIApp, most: int) -> None:
    """Set the application of this process. Raises RuntimeError if Ray does not use
    `middlewares`."""
    for name, value in MIDDLEWARES.items():
        if os.environ.get(name) != value:
            raise RuntimeError(
                f"the environment variable {name} is {os.environ.get(name)!r}. Set it to {value} "
                "on every node before Ray starts, like the other variables that `kway serve "
                "--print-config` lists"
            )
    _Application.asgi, _Application.most = asgi, most


class Ingress:
    """ASGI middleware around Ray's application, in replicas and in Ray's own proxy.

    Raises RuntimeError if the installed Ray does not have the names that it needs.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._rays, self._own = app, _Application.asgi
        self._in_progress = 0
        if self._own is not None:
            self._add_ongoing = ongoing_requests_of(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Paths below /-/ are Ray's own, such as its health check.
        if self._own is None or scope["path"].startswith("/-/"):
            await self._rays(scope, receive, send)
        elif self._in_progress >= _Application.most:
            await reject(too_many_requests(), scope, receive, send)
        else:
            await self._counted(self._own, scope, receive, send)

    async def _counted(self, asgi: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        self._in_progress += 1
        self._add_ongoing(1)
        try:
            await asgi(scope, receive, send)
        finally:
            self._in_progress -= 1
            self._add_ongoing(-1)
