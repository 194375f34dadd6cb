"""Start the whole server on this machine, and leave nothing running behind."""

import logging
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from serving.config import ServingConfig
from serving.deploy.environment import HTTP_ERRORS_FIFO, set_environment
from serving.deploy.error_reports import counted_http_errors, shown_errors
from serving.deploy.private_ray import local_options, own_process_groups
from serving.deploy.session import cleaned_up, free_port, make_session
from serving.deploy.stop_signal import ServerLostError

_APPLICATION = "kway"
_LOOPBACK = "127.0.0.1"
_PACKAGES = Path(__file__).parents[2]
_OBJECT_STORE_BYTES = 100 * 2**20
# Of requests in progress, when the server is told to end.
_GRACE_SECONDS = 10
_STOP_SECONDS = 30


class Addresses(NamedTuple):
    """Where a server is reached: its URL, and host:port of gRPC where that is there."""

    url: str
    grpc: str | None


@contextmanager
def running(bundle: Path, config: ServingConfig) -> Iterator[Addresses]:
    """Serve the bundle folder on `config.host`; yields where, when the server is ready.

    A port of 0 takes any free one. The replicas' errors come out on standard error. On
    leaving, and when this process is killed, all that was started is stopped and the session
    folder is removed. Raises ChildProcessError when the server does not come up.
    """
    config = _with_ports(config)
    session = make_session()
    errors = session / "errors.log"
    with cleaned_up(session):
        before = set(psutil.Process().children(recursive=True))
        try:
            set_environment(session, config)
            with shown_errors(errors), counted_http_errors(session / HTTP_ERRORS_FIFO):
                _start(bundle, config, session, errors)
                yield _addresses(config)
        finally:
            # Ray, asked to stop, would wait a minute for what has ended, and then end this process
            # in its own words. The clean-up process kills what is left.
            if not isinstance(sys.exception(), ServerLostError):
                _stop(before)
                shutil.rmtree(session, ignore_errors=True)


def _with_ports(config: ServingConfig) -> ServingConfig:
    """The same with free ports in the places of 0."""
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
    import ray
    import ray.serve  # sets its loggers' levels: before they are quiet
    from ray.exceptions import RayError

    with _quiet_ray():
        _start_ray(config, session)
        if ray.util.get_node_ip_address() != _LOOPBACK:
            raise ChildProcessError(
                "Ray was imported before the server and would listen on every network interface: "
                "start the server in a process of its own"
            )
        try:
            _deploy(bundle, config, errors)
        except (RuntimeError, RayError) as error:
            reason = _last_line(_replica_messages() or str(error))
            if "Address already in use" in str(error):
                reason = f"something else has begun to listen on port {config.port} or another"
            raise ChildProcessError(f"the server did not start: {reason}") from error


def _deploy(bundle: Path, config: ServingConfig, errors: Path) -> None:
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from serving.deploy.deployment import application, grpc_options

    logs = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(
        proxy_location="HeadOnly",
        # Of the replicas: HAProxy listens where `serving/deploy/haproxy.py` says. Requests have
        # their own limits of time, and streams none.
        http_options={
            "host": _LOOPBACK,
            "port": config.port,
            "request_timeout_s": None,
            "keep_alive_timeout_s": 30,
        },
        grpc_options=None if config.grpc_port is None else grpc_options(config.grpc_port),
        logging_config=logs,
    )
    deployed = application(str(bundle.resolve()), config, errors, grace_seconds=_GRACE_SECONDS)
    serve.run(deployed, name=_APPLICATION, logging_config=logs)


def _start_ray(config: ServingConfig, session: Path) -> None:
    import ray

    folder = session / "ray"  # Ray opens its folder to everybody; the session stays closed
    handler = signal.getsignal(signal.SIGTERM)
    try:
        # Ray lets replicas import from its driver's current folder before all others; one with a
        # folder data/ in it would hide ours.
        with own_process_groups(), chdir(_PACKAGES):
            ray.init(
                address="local",  # never a cluster that happens to be there
                num_cpus=config.most_replicas,
                num_gpus=config.most_replicas if config.device == "cuda" else 0,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                **local_options(_LOOPBACK, str(folder)),
            )
    except SystemExit:
        # Ray's handler of SIGTERM, in place during its start, exits with 15: this was a wish.
        raise SystemExit(0) from None
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _replica_messages() -> str:
    """What Ray knows of the replicas that did not start; nothing where it came to none."""
    from ray import serve

    found = serve.status().applications.get(_APPLICATION)
    return "\n".join(one.message for one in found.deployments.values()) if found else ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "Ray gives no reason"


@contextmanager
def _quiet_ray() -> Iterator[None]:
    """Keep Ray's start-up chatter off the terminal; its errors stay."""
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
    """End what runs now and did not run before; requests in progress are answered first.

    Raises ServerLostError where Ray does not answer: the clean-up process kills what there is.
    """
    started = set(psutil.Process().children(recursive=True)) - before
    ray, serve = sys.modules.get("ray"), sys.modules.get("ray.serve")
    is_up = ray is not None and serve is not None and ray.is_initialized()

    def ask() -> None:
        if ray is None:
            return
        if is_up and serve is not None:
            # What does not end in order is killed below.
            with suppress(ray.exceptions.RayError, RuntimeError, OSError):
                # Not serve.shutdown: it kills its controller, and Ray prints that as an error.
                serve.delete(_APPLICATION)
            # HAProxy is another process after each change of the replicas.
            started.update(set(psutil.Process().children(recursive=True)) - before)
        ray.shutdown()

    with _quiet_ray():
        # For as long as a controller hangs Ray waits for it, and hears no signal.
        asking = threading.Thread(target=ask, name="stop", daemon=True)
        asking.start()
        asking.join(_STOP_SECONDS)
    if asking.is_alive():
        raise ServerLostError(
            f"Ray did not stop within {_STOP_SECONDS} s of the wish: its processes were killed"
        )
    # What an interrupted start has left does not end by itself.
    _, left = psutil.wait_procs(started, timeout=10 if is_up else 1)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=5)
