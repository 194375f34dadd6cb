"""Serve a bundle with uvicorn, without Ray: in this process, or in several worker processes.

Until the model is loaded, requests are answered with status 503. The limits of the configuration
apply to each worker.
"""

import asyncio
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from prometheus_client.multiprocess import mark_process_dead
from starlette.types import ASGIApp, Receive, Scope, Send

from data.messages import one_line
from data.processes import die_with_parent
from serving.addresses import Addresses
from serving.api_error import RETRY, ApiError
from serving.config import ServingConfig
from serving.http.error_responses import response_of
from serving.metrics import FOLDER_VARIABLE, Prometheus
from serving.stop_signal import StopSignal
from serving.temporary import temporary_folder

if TYPE_CHECKING:  # grpcio is imported only if gRPC is enabled
    from grpc.aio import Server as GrpcServer

    from serving.replica import Replica

# How long requests in progress may take at shutdown.
_GRACE_SECONDS = 10
# Connections beyond those of the requests and uploads that the configuration allows. uvicorn
# answers further ones with status 503.
_SPARE_CONNECTIONS = 128
# The exit code of a worker that cannot load the bundle.
_NOT_LOADED = 3
# A worker is replaced no sooner than this after its start.
_RESTART_SECONDS = 5.0


class Application:
    """The ASGI application of a process. It loads the model when the server has started. If
    `on_loaded` is given, it loads the model before the server accepts connections, and then calls
    `on_loaded`."""

    def __init__(
        self,
        bundle: Path,
        config: ServingConfig,
        on_loaded: Callable[[], None] | None = None,
    ) -> None:
        self._bundle, self._config, self._on_loaded = bundle, config, on_loaded
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
        if self._on_loaded is None:
            threading.Thread(target=self._load, args=(loop,), name="load", daemon=True).start()
        else:
            await asyncio.to_thread(self._load, loop)
            if self.error is not None:
                await send({"type": "lifespan.startup.failed"})
                return
            self._on_loaded()
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


def run_workers(
    bundle: Path, config: ServingConfig, workers: int, stop: StopSignal, curl: str
) -> None:
    """Serve the bundle in `workers` processes until a stop signal, and print the addresses once one
    of them is ready. A worker that exits is replaced, and accepts connections once it is loaded.

    Raises ChildProcessError if the first workers cannot load the bundle.
    """
    # prometheus_client collects the metrics of all workers from files in this folder.
    with temporary_folder("kway-metrics-") as folder, _listener(config) as listener:
        os.environ[FOLDER_VARIABLE] = str(folder)
        running = [_Worker(bundle, config, listener) for _ in range(workers)]
        was_ready = False

        def check() -> None:
            nonlocal was_ready
            if not was_ready and any(worker.has_loaded() for worker in running):
                was_ready = True
                print(Addresses.of(config).ready(curl), flush=True)
            for index, worker in enumerate(running):
                if worker.process.is_alive():
                    continue
                mark_process_dead(worker.process.pid, str(folder))
                if not was_ready and worker.process.exitcode == _NOT_LOADED:
                    raise ChildProcessError("no worker could load the bundle: see its error above")
                if time.monotonic() - worker.started > _RESTART_SECONDS:
                    running[index] = _Worker(bundle, config, listener)

        try:
            stop.wait(check)
        finally:
            for worker in running:
                worker.process.terminate()
            for worker in running:
                worker.process.join(_GRACE_SECONDS + 5)
                worker.process.kill()
                worker.process.join()


def _listener(config: ServingConfig) -> socket.socket:
    """Return the socket that all workers share. Connections wait until a worker accepts them."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    return socket.create_server((config.host, config.port), family=family, backlog=2048)


class _Worker:
    """A process that serves the bundle."""

    def __init__(self, bundle: Path, config: ServingConfig, listener: socket.socket) -> None:
        context = multiprocessing.get_context("spawn")
        # Not an Event: a SIGHUP to all processes ends multiprocessing's tracker of semaphores.
        self._loaded, sender = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_work, args=(bundle, config, listener, sender), name="worker"
        )
        self.process.start()
        self.started = time.monotonic()

    def has_loaded(self) -> bool:
        """Return whether the worker has reported that it has loaded the bundle, once."""
        try:
            return self._loaded.poll() and bool(self._loaded.recv())
        except EOFError:  # the worker has ended
            return False


def _work(bundle: Path, config: ServingConfig, listener: socket.socket, loaded: Connection) -> None:
    parent = multiprocessing.parent_process()
    die_with_parent(None if parent is None else parent.pid)
    # A terminal sends these to all processes, but only the parent decides.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    application = Application(bundle, config, lambda: loaded.send(True))
    server = uvicorn.Server(uvicorn.Config(application, **_options(config)))
    try:
        server.run(sockets=[listener])  # may exit
    finally:
        gc.unfreeze()  # nanobind reports objects that are not collected at exit
        if application.error is not None:
            print(f"error: {one_line(application.error)}", file=sys.stderr, flush=True)
            sys.exit(_NOT_LOADED)


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
