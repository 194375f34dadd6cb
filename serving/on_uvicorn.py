"""Serve a bundle with uvicorn, without Ray: in this process, or in several worker processes.

Until the model is loaded, requests to a single process are answered with status 503. The limits of
the configuration apply to each worker.
"""

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
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


class Application:
    """The ASGI application of a process. It loads the model when the server has started, or, if
    `loads_first`, before the server accepts connections."""

    def __init__(self, bundle: Path, config: ServingConfig, *, loads_first: bool) -> None:
        self._bundle, self._config, self._loads_first = bundle, config, loads_first
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
        if self._loads_first:
            await asyncio.to_thread(self._load, loop)
        else:
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
def running(
    bundle: Path, config: ServingConfig, listener: socket.socket | None = None
) -> Iterator[tuple[Addresses, Callable[[], None]]]:
    """Serve the bundle in this process. Once the model is loaded, yields the addresses and a
    function that does nothing. At the end, waits for requests in progress. A worker accepts
    connections from `listener` once it has loaded the model, because the other workers can answer
    until then.

    Raises the same exceptions as `Replica`.
    """
    application = Application(bundle, config, loads_first=listener is not None)
    options = uvicorn.Config(
        application,
        host=config.host,
        port=config.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        proxy_headers=False,
        limit_concurrency=config.max_requests + config.max_uploads + _SPARE_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = uvicorn.Server(options)
    # uvicorn handles signals only in the main thread. The caller handles them.
    sockets = None if listener is None else [listener]
    thread = threading.Thread(target=server.run, args=(sockets,), name="server", daemon=True)
    thread.start()
    try:
        while not application.loaded.wait(0.1):
            if not thread.is_alive():
                raise OSError(f"cannot listen on {config.host} port {config.port}")
        if application.error is not None:
            raise application.error
        yield Addresses.of(config), lambda: None
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def running_workers(
    bundle: Path, config: ServingConfig
) -> Iterator[tuple[Addresses, Callable[[], None]]]:
    """Serve the bundle in `config.replicas` processes, which share the threads. Yields the
    addresses once one of them is ready, and a function that replaces workers that have exited. At
    the end, waits for requests in progress.

    Raises ChildProcessError if a worker exits before one is ready.
    """
    spawn = multiprocessing.get_context("spawn")
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    address = (config.host, config.port)
    with (
        # prometheus_client collects the metrics of all workers from files in this folder.
        temporary_folder("kway-metrics-") as folder,
        # Connections wait until a worker accepts them.
        socket.create_server(address, family=family, backlog=2048) as listener,
    ):
        os.environ[FOLDER_VARIABLE] = str(folder)
        processes: list[multiprocessing.process.BaseProcess] = []

        def add_worker() -> None:
            given = (bundle, config, listener)
            processes.append(spawn.Process(target=_work, args=given, name="worker", daemon=True))
            processes[-1].start()

        def replace_lost() -> None:
            for worker in [worker for worker in processes if not worker.is_alive()]:
                mark_process_dead(worker.pid, str(folder))
                processes.remove(worker)
                add_worker()

        try:
            for _ in range(config.replicas):
                add_worker()
            addresses = Addresses.of(config)
            is_ready = False
            while not is_ready:
                if not all(worker.is_alive() for worker in processes):
                    raise ChildProcessError("a worker could not start: see its error above")
                with suppress(httpx.TransportError):
                    answer = httpx.get(f"{addresses.url}/health", trust_env=False, timeout=1)
                    is_ready = answer.is_success
            yield addresses, replace_lost
        finally:
            for worker in processes:
                worker.terminate()
            deadline = time.monotonic() + _GRACE_SECONDS + 5
            for worker in processes:
                worker.join(max(0, deadline - time.monotonic()))
                worker.kill()
                worker.join()


def _work(bundle: Path, config: ServingConfig, listener: socket.socket) -> None:
    """Serve the bundle in this worker until SIGTERM."""
    parent = multiprocessing.parent_process()
    die_with_parent(None if parent is None else parent.pid)
    # A terminal sends these to all processes, but only the parent decides.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    stop = StopSignal()
    try:
        with running(bundle, config, listener):
            stop.wait(lambda: None)
    except Exception as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        sys.exit(1)
