"""Serve a bundle with uvicorn in this process, without Ray.

Until the model is loaded, requests are answered with status 503.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.addresses import Addresses
from serving.api_error import RETRY, ApiError
from serving.config import ServingConfig
from serving.http.error_responses import response_of
from serving.metrics import Prometheus

if TYPE_CHECKING:  # grpcio is imported only if gRPC is enabled
    from grpc.aio import Server as GrpcServer

    from serving.replica import Replica

# How long requests in progress may take at shutdown.
_GRACE_SECONDS = 10
# Connections beyond those of the requests and uploads that the configuration allows. uvicorn
# answers further ones with status 503.
_SPARE_CONNECTIONS = 128


class Application:
    """The ASGI application of a process. It loads the model when the server has started."""

    def __init__(self, bundle: Path, config: ServingConfig) -> None:
        self._bundle, self._config = bundle, config
        self._app: ASGIApp | None = None
        self._grpc: GrpcServer | None = None
        # Set when the model is loaded, or cannot be loaded because of `error`.
        self.loaded = threading.Event()
        self.error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif self._app is None:
            error = ApiError(503, "loading", "the model is being loaded. Try again", RETRY)
            await response_of(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._load, args=(loop,), name="load", daemon=True).start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._grpc is not None:
            await self._grpc.stop(_GRACE_SECONDS)
        await send({"type": "lifespan.shutdown.complete"})

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            from serving.replica import Replica  # imports torch

            exporter = Prometheus()
            replica = Replica(self._bundle, self._config, exporter, exporter.page)
            if self._config.grpc_port is not None:
                asyncio.run_coroutine_threadsafe(self._start_grpc(replica), loop).result()
            self._app = replica.app
        except Exception as error:
            self.error = error
        self.loaded.set()

    async def _start_grpc(self, replica: "Replica") -> None:
        from serving.inference.methods import grpc_server

        self._grpc = grpc_server(replica.methods, self._config)
        await self._grpc.start()


@contextmanager
def running(bundle: Path, config: ServingConfig) -> Iterator[Addresses]:
    """Serve the bundle in this process. Yields the addresses once the model is loaded. At the end,
    waits for requests in progress.

    Raises the same exceptions as `Replica`.
    """
    application = Application(bundle, config)
    options = uvicorn.Config(
        application,
        host=config.host,
        port=config.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        proxy_headers=False,  # the header with a client's address is an option of kway
        limit_concurrency=config.max_requests + config.max_uploads + _SPARE_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = uvicorn.Server(options)
    # uvicorn handles signals only in the main thread. The caller handles them.
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    try:
        while not application.loaded.wait(0.1):
            if not thread.is_alive():
                raise OSError(f"cannot listen on {config.host} port {config.port}")
        if application.error is not None:
            raise application.error
        yield Addresses.of(config)
    finally:
        server.should_exit = True
        thread.join()
