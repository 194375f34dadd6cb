"""Start the whole server on this machine, wait for its end, and leave nothing running behind."""

import functools
import logging
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import psutil

from serving.config import ServingConfig
from serving.deploy.guard import guarded
from serving.deploy.log import shown_errors
from serving.deploy.loopback import set_environment

_APPLICATION = "kway"
_PACKAGES = Path(__file__).parents[2]
_OBJECT_STORE_BYTES = 100 * 2**20
_POLL_SECONDS = 1.0
_SILENCE_SECONDS = 60.0


def free_port(host: str, port: int) -> int:
    """`port`, or any free one for 0. Raises OSError when it is taken or `host` is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(
                f"cannot listen on {host} port {port} ({error.strerror or error}): stop what uses "
                "it, or give another one by --port"
            ) from error
        return int(probe.getsockname()[1])


@contextmanager
def running(bundle: Path, config: ServingConfig) -> Iterator[str]:
    """Serve the bundle folder on `config.host`; yields the URL when the server is ready.

    `config.port` 0 takes any free port. The replicas' errors come out on standard error. On
    leaving, and when this process is killed, all that was started is stopped and Ray's session
    folder is removed. Raises ChildProcessError when the server does not come up.
    """
    port = free_port(config.host, config.port)
    set_environment()
    session = Path(tempfile.mkdtemp(prefix="kway-ray-"))
    errors = session / "errors.log"
    with guarded(session):
        before = set(psutil.Process().children(recursive=True))
        try:
            with shown_errors(errors):
                _start(bundle, config.model_copy(update={"port": port}), session, errors)
                yield _url(config.host, port)
        finally:
            _stop(before)
            shutil.rmtree(session, ignore_errors=True)


def _url(host: str, port: int) -> str:
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{local}:{port}"


def _start(bundle: Path, config: ServingConfig, session: Path, errors: Path) -> None:
    import ray
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from serving.deploy.deployment import application

    with _quiet_ray():
        _start_ray(config.replicas, session)
        if ray.util.get_node_ip_address() != "127.0.0.1":
            raise ChildProcessError(
                "Ray was imported before the server and would listen on every network interface: "
                "start the server in a process of its own"
            )
        logs = LoggingConfig(log_level="WARNING", enable_access_log=False)
        serve.start(
            proxy_location="HeadOnly",
            http_options={
                "host": config.host,
                "port": config.port,
                # The service answers its own timeout first; this one is for what it cannot see.
                "request_timeout_s": config.request_timeout_seconds + 10,
                "keep_alive_timeout_s": 30,
            },
            logging_config=logs,
        )
        try:
            serve.run(application(bundle, config, errors), name=_APPLICATION, logging_config=logs)
        except RuntimeError as error:
            reason = _last_line(str(error))
            raise ChildProcessError(f"the server did not start: {reason}") from error


def _start_ray(num_replicas: int, session: Path) -> None:
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    try:
        # Ray lets replicas import from its driver's current folder before all others; one with a
        # folder data/ in it would hide ours.
        with _own_process_groups(), chdir(_PACKAGES):
            ray.init(
                address="local",  # never a cluster that happens to be there
                num_cpus=num_replicas,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(session),
                _system_config={"metrics_report_interval_ms": 1000},
            )
    except SystemExit:
        # Ray's handler of SIGTERM, in place during its start, exits with 15: this was a wish.
        raise SystemExit(0) from None
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """Start Ray's daemons outside our process group.

    A terminal, `timeout` and others signal the whole group: the daemons would die together with
    our wish to stop them in order, and Ray then waits a minute for them. Ray has no setting for it.
    """
    from ray._private import services as ray_services

    services: Any = ray_services
    start = services.ConsolePopen
    services.ConsolePopen = functools.partial(start, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = start


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
    """End what runs now and did not run before; requests in progress are answered first."""
    started = set(psutil.Process().children(recursive=True)) - before
    ray, serve = sys.modules.get("ray"), sys.modules.get("ray.serve")
    grace_seconds = 1  # what an interrupted start has left does not end by itself
    try:
        if ray is not None and serve is not None and ray.is_initialized():
            grace_seconds = 10
            with _quiet_ray():
                # Not serve.shutdown: it kills its controller, and Ray prints that as an error.
                serve.delete(_APPLICATION)
    finally:
        if ray is not None:
            ray.shutdown()
        _, left = psutil.wait_procs(started, timeout=grace_seconds)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=5)


class StopSignal:
    """SIGINT, SIGTERM and SIGHUP as a flag. Before `hold`, during the start: SystemExit(0)."""

    def __init__(self) -> None:
        self._set = threading.Event()
        self._raises = True
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # by nohup
                signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._set.set()
        if self._raises:
            self._raises = False  # a second signal must not interrupt the clean-up
            raise SystemExit(0)

    def hold(self, url: str) -> None:
        """Wait for a signal. Raises ChildProcessError when the server at `url` falls silent."""
        self._raises = False
        heard = time.monotonic()
        while not self._set.wait(_POLL_SECONDS):
            if _answers(url):
                heard = time.monotonic()
            elif time.monotonic() - heard > _SILENCE_SECONDS:
                raise ChildProcessError(
                    f"{url} has not answered for {_SILENCE_SECONDS:.0f} s: start it again"
                )


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code < 500
    except httpx.HTTPError:
        return False
