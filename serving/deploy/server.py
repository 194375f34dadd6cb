"""Start the complete server on this machine and stop all of its processes on exit."""

import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from serving.config import CLIENT_ADDRESS_HEADER, ServingConfig
from serving.deploy.environment import HTTP_ERRORS_FIFO, set_environment
from serving.deploy.error_reports import counted_http_errors, shown_errors
from serving.deploy.preparation import Prepared
from serving.deploy.private_ray import (
    hide_pandas,
    local_options,
    own_process_groups,
    unhide_pandas,
    without_unused_daemons,
)
from serving.deploy.session import cleaned_up, free_port, kill_writers, make_session
from serving.deploy.stop_signal import ServerLostError

_APPLICATION = "kway"
_LOOPBACK = "127.0.0.1"
_PACKAGES = Path(__file__).parents[2]
_OBJECT_STORE_BYTES = 100 * 2**20
# How long requests in progress may take at shutdown.
_GRACE_SECONDS = 10
_STOP_SECONDS = 30


class Addresses(NamedTuple):
    """The addresses of a server: its URL and, if gRPC is enabled, the host:port of gRPC."""

    url: str
    grpc: str | None


@contextmanager
def running(bundle: Path, config: ServingConfig, prepared: Prepared) -> Iterator[Addresses]:
    """Serve the bundle folder on `config.host`. Yields the server's addresses once it is ready.
    `prepared` is the result of `prepare` for this bundle and config.

    A port of 0 selects any free port. Errors from the replicas are printed to standard error. On
    exit, or if this process is killed, all of the server's processes are stopped and the session
    folder is removed. Raises ChildProcessError if the server does not start.
    """
    header = config.client_address_header or CLIENT_ADDRESS_HEADER
    config = _with_ports(config.model_copy(update={"client_address_header": header}))
    session = make_session()
    errors = session / "errors.log"
    with cleaned_up(session):
        before = set(psutil.Process().children(recursive=True))
        try:
            set_environment(session, config, prepared.routes)
            with shown_errors(errors), counted_http_errors(session / HTTP_ERRORS_FIFO):
                _start(bundle, config, session, errors)
                yield _addresses(config)
        finally:
            # After Ray's processes have died, a shutdown through Ray would wait a minute for them
            # and then exit this process with Ray's own message. Skip it: the clean-up process kills
            # the remaining processes.
            if not isinstance(sys.exception(), ServerLostError):
                _stop(before)
                # HAProxy's manager may have started another HAProxy process in the meantime.
                psutil.wait_procs(kill_writers(session, os.getpid()), timeout=5)
                shutil.rmtree(session, ignore_errors=True)


def _with_ports(config: ServingConfig) -> ServingConfig:
    """Replace ports of 0 with free ports."""
    port, grpc_port = free_port(config.host, config.port), config.grpc_port
    while grpc_port == 0:
        drawn = free_port(config.host, 0)
        grpc_port = drawn if drawn != port else 0
    if grpc_port is not None:
        free_port(config.host, grpc_port, option="--grpc-port")
    return config.model_copy(update={"port": port, "grpc_port": grpc_port})


def _addresses(config: ServingConfig) -> Addresses:
    host = config.host
    local = {"0.0.0.0": _LOOPBACK, "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    grpc = None if config.grpc_port is None else f"{local}:{config.grpc_port}"
    return Addresses(f"http://{local}:{config.port}", grpc)


def _start(bundle: Path, config: ServingConfig, session: Path, errors: Path) -> None:
    hide_pandas()
    import ray
    import ray.serve  # sets the levels of Ray's loggers, so import it before silencing them

    unhide_pandas()
    from ray.exceptions import RayError

    with _quiet_ray():
        _start_ray(config, session)
        if ray.util.get_node_ip_address() != _LOOPBACK:
            raise ChildProcessError(
                "Ray was imported before the server was started and would listen on every network "
                "interface. Start the server in a separate process"
            )
        try:
            _deploy(bundle, config, errors)
        except (RuntimeError, RayError) as error:
            reason = _last_line(_replica_messages() or str(error))
            if "Address already in use" in str(error):
                reason = (
                    f"another process is using port {config.port} or another port of the server. "
                    "Start the server again"
                )
            raise ChildProcessError(f"the server did not start: {reason}") from error


def _deploy(bundle: Path, config: ServingConfig, errors: Path) -> None:
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from serving.deploy.deployment import application, grpc_options

    logs = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(
        proxy_location="HeadOnly",
        # The address of the replicas and Ray's own proxy; `serving/deploy/haproxy.py` sets
        # HAProxy's. Requests have their own timeouts.
        http_options={
            "host": _LOOPBACK,
            "port": config.port,
            "request_timeout_s": None,
            "keep_alive_timeout_s": 30,
        },
        grpc_options=None if config.grpc_port is None else grpc_options(config.grpc_port),
        logging_config=logs,
    )
    # Keep symbolic links: another target is another version.
    path = os.path.abspath(bundle)
    deployed = application(path, config, errors, grace_seconds=_GRACE_SECONDS)
    serve.run(deployed, name=_APPLICATION, logging_config=logs)


def _start_ray(config: ServingConfig, session: Path) -> None:
    import ray

    # Ray makes its folder accessible to all users; the session folder that contains it is private.
    folder = session / "ray"
    handler = signal.getsignal(signal.SIGTERM)
    try:
        # When a replica imports a module, it searches the driver's working directory first. A
        # folder data/ there would shadow kway's package of the same name.
        with own_process_groups(), without_unused_daemons(), chdir(_PACKAGES):
            ray.init(
                address="local",  # do not join a cluster that is already running
                num_cpus=config.replica_limit,
                num_gpus=config.replica_limit if config.device == "cuda" else 0,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                **local_options(_LOOPBACK, str(folder)),
            )
    except SystemExit:
        # While Ray is starting, its SIGTERM handler exits with status 15, but a requested stop is
        # not an error.
        raise SystemExit(0) from None
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _replica_messages() -> str:
    """Return Ray's messages about replicas that failed to start, or an empty result if Ray did not
    deploy any."""
    from ray import serve

    found = serve.status().applications.get(_APPLICATION)
    return "\n".join(one.message for one in found.deployments.values()) if found else ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "Ray did not report a reason"


@contextmanager
def _quiet_ray() -> Iterator[None]:
    """Silence Ray's log messages below ERROR."""
    loggers = [logging.getLogger(name) for name in ("ray", "ray.serve")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _stop(before: set[psutil.Process]) -> None:
    """Let requests in progress finish, then stop the processes that are not in `before`.

    Raises ServerLostError if Ray does not respond; the clean-up process then kills the
    remaining processes.
    """
    started = set(psutil.Process().children(recursive=True)) - before
    ray, serve = sys.modules.get("ray"), sys.modules.get("ray.serve")
    is_running = ray is not None and serve is not None and ray.is_initialized()

    def shut_down() -> None:
        if ray is None:
            return
        if is_running and serve is not None:
            # Processes that fail to shut down cleanly are killed below.
            with suppress(ray.exceptions.RayError, RuntimeError, OSError):
                # Do not call serve.shutdown: it kills the controller, and Ray reports that as an
                # error.
                serve.delete(_APPLICATION)
            # A new HAProxy process starts whenever the set of replicas changes, so update the list
            # of processes.
            started.update(set(psutil.Process().children(recursive=True)) - before)
        ray.shutdown()

    with _quiet_ray():
        # Use a thread, because Ray blocks and does not react to signals if the controller hangs.
        thread = threading.Thread(target=shut_down, name="stop", daemon=True)
        thread.start()
        thread.join(_STOP_SECONDS)
    if thread.is_alive():
        raise ServerLostError(
            f"Ray did not stop within {_STOP_SECONDS} s. Its processes were killed"
        )
    # Processes left by an interrupted start do not exit on their own.
    _, remaining = psutil.wait_procs(started, timeout=10 if is_running else 1)
    for process in remaining:
        process.kill()
    psutil.wait_procs(remaining, timeout=5)
