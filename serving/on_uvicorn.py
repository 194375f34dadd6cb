"""Serve a bundle with uvicorn, without Ray: in this process, or in several worker processes.

Until the model is loaded, requests are answered with status 503. The limits of the configuration
apply to each worker.
"""

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import uvicorn
from prometheus_client.multiprocess import mark_process_dead
from starlette.types import ASGIApp, Receive, Scope, Send

from data.messages import one_line
from data.processes import die_with_parent
from serving.addresses import Addresses
from serving.api_error import RETRY, ApiError
from serving.config import ServingConfig
from serving.http.error_responses import reject
from serving.metrics import FOLDER_VARIABLE, Prometheus
from serving.temporary import temporary_folder

if TYPE_CHECKING:  # grpcio is imported only if gRPC is enabled
    from grpc.aio import Server as GrpcServer

    from serving.replica import Replica

# How long requests in progress may take at shutdown.
_GRACE_SECONDS = 10
# Connections beyond those of the requests and uploads that the configuration allows. uvicorn
# answers further ones with status 503.
_SPARE_CONNECTIONS = 128
# The workers read these variables.
_BUNDLE, _CONFIG = "KWAY_SERVED_BUNDLE", "KWAY_SERVING_CONFIG"


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
            await reject(error, scope, receive, send)
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
    server = uvicorn.Server(uvicorn.Config(application, **_options(config)))
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
        gc.unfreeze()  # nanobind reports objects that are not collected at exit


def run_workers(bundle: Path, config: ServingConfig, workers: int, curl: str) -> None:
    """Serve the bundle in `workers` processes until SIGINT or SIGTERM, and print the addresses once
    one of them is ready. uvicorn restarts a worker that exits."""
    # prometheus_client collects the metrics of all workers from files in this folder.
    with temporary_folder("kway-metrics-") as folder:
        os.environ |= {
            FOLDER_VARIABLE: str(folder),
            _BUNDLE: str(bundle),
            _CONFIG: config.model_dump_json(),
        }
        threading.Thread(target=_announce, args=(config, curl), daemon=True).start()
        threading.Thread(target=_remove_lost, args=(folder,), daemon=True).start()
        uvicorn.run(
            f"{__name__}:worker_application", factory=True, workers=workers, **_options(config)
        )


def worker_application() -> Application:
    """Return the application of a worker process."""
    die_with_parent()
    config = ServingConfig.model_validate_json(os.environ[_CONFIG])
    application = Application(Path(os.environ[_BUNDLE]), config)

    def stop_if_failed() -> None:
        application.loaded.wait()
        if application.error is not None:
            print(f"error: {one_line(application.error)}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_if_failed, daemon=True).start()
    return application


def _options(config: ServingConfig) -> dict[str, Any]:
    return {
        "host": config.host,
        "port": config.port,
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "ws": "none",
        # The header with a client's address is an option of kway.
        "proxy_headers": False,
        "limit_concurrency": config.max_requests + config.max_uploads + _SPARE_CONNECTIONS,
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": _GRACE_SECONDS,
    }


def _announce(config: ServingConfig, curl: str) -> None:
    """Print the addresses once a worker is ready."""
    addresses = Addresses.of(config)
    with httpx.Client(trust_env=False) as client:
        while True:
            try:
                if client.get(f"{addresses.url}/health").is_success:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
    print(addresses.ready(curl), flush=True)


def _remove_lost(folder: Path) -> None:
    """Remove the gauges of workers that have exited from the metrics."""
    this, before = psutil.Process(), set[int]()
    while True:
        found = {child.pid for child in this.children()}
        for pid in before - found:
            mark_process_dead(pid, str(folder))
        before = found
        time.sleep(1)
