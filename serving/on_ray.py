"""Serve a bundle with Ray Serve, on this machine or on an existing Ray cluster.

On a cluster, `serve deploy`, `serve run` and KubeRay's RayService use `build` with the arguments
`ClusterArguments` (`config_file`). kway must be installed on all nodes, and the bundle's folder
must exist at the same path on each.
"""

import logging
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import yaml
from pydantic import BaseModel, ConfigDict, Field

from data.messages import one_line
from data.retry import TransientError
from serving.addresses import Addresses
from serving.config import ServingConfig
from serving.temporary import temporary_folder

# Ray reads its environment variables when it is imported, so this module does not import it.
if TYPE_CHECKING:
    from ray.serve import Application

_NAME = "kway"
_PACKAGES = Path(__file__).parents[1]
_OBJECT_STORE_BYTES = 100 * 2**20
# How long requests in progress may take at shutdown, and how long Ray's processes may take to stop.
_GRACE_SECONDS, _STOP_SECONDS = 10, 30
# Added to the request timeout, which does not cover all of the processing.
_SPARE_SECONDS = 5
# Ray writes its logs to the folder. If the disk is full, Ray restarts its processes forever.
_MIN_FREE_BYTES = 2**28
# gRPC has a single limit for requests and responses, and a response takes a few KiB, even if the
# limit on requests is smaller.
_MIN_MESSAGE_BYTES, _MAX_MESSAGE_BYTES = 2**20, 2**31 - 1
# Ray's documented mode in which HAProxy sends requests directly to the replicas.
_HIGH_THROUGHPUT = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}


class ClusterArguments(BaseModel):
    """The `args` of the application in the config file."""

    model_config = ConfigDict(extra="forbid")

    bundle: str = Field(description="bundle folder, at the same path on every node")
    config: ServingConfig = ServingConfig()


def build(arguments: ClusterArguments) -> "Application":
    """Build the application; Serve calls this with the file's `args`.

    The grace period exceeds the request timeout, so a replica that is scaled down or replaced can
    finish its remaining requests.
    """
    from serving.ray_deployment import application

    grace_seconds = arguments.config.request_timeout_seconds + _SPARE_SECONDS
    return application(arguments.bundle, arguments.config, grace_seconds=grace_seconds)


def config_file(bundle: str, config: ServingConfig) -> str:
    """Return a Serve config file (YAML) for the bundle folder `bundle`, with every limit
    explicit."""
    arguments = ClusterArguments(bundle=bundle, config=config).model_dump(
        mode="json", exclude={"config": {"host", "port", "grpc_port"}}
    )
    tree = {
        "proxy_location": "EveryNode",
        "http_options": _http_options(config),
        **({} if config.grpc_port is None else {"grpc_options": _grpc_options(config.grpc_port)}),
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": _NAME,
                "route_prefix": "/",
                "import_path": f"{build.__module__}:{build.__name__}",
                "args": arguments,
            }
        ],
    }
    lines = "".join(f"#   {name}={value}\n" for name, value in variables(config).items())
    heading = (
        "# Use with `serve deploy` or as the serveConfigV2 of a RayService. Set these variables\n"
        f"# on every node before Ray starts:\n{lines}"
        "# Ray then listens on all addresses without TLS. Run the cluster in a private network,\n"
        "# with RAY_AUTH_MODE=token, behind an ingress that limits body sizes and request times.\n"
    )
    return heading + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def variables(config: ServingConfig) -> dict[str, str]:
    """Return the environment variables of every Ray node that serves a bundle."""
    # By default, Ray runs its workers, such as replicas and proxies, at nice 15.
    found = {"RAY_worker_niceness": "0"}
    if config.high_throughput:
        found |= _HIGH_THROUGHPUT
    if config.grpc_port is not None:
        most = min(max(config.max_body_bytes, _MIN_MESSAGE_BYTES), _MAX_MESSAGE_BYTES)
        found["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"] = str(most)
    return found


def _http_options(config: ServingConfig) -> dict[str, Any]:
    # Ray responds with status 408 if no replica has taken a request by then.
    timeout = config.request_timeout_seconds + _SPARE_SECONDS
    return {
        "host": config.host,
        "port": config.port,
        "request_timeout_s": timeout,
        "keep_alive_timeout_s": 30,
    }


def _grpc_options(port: int) -> dict[str, Any]:
    from serving.inference.servicer import add_methods_to_server

    function = f"{add_methods_to_server.__module__}.{add_methods_to_server.__name__}"
    return {"port": port, "grpc_servicer_functions": [function]}


# ------------------------------------------------------------------------------- on this machine


@contextmanager
def running(bundle: Path, config: ServingConfig) -> Iterator[tuple[Addresses, Callable[[], None]]]:
    """Serve the bundle with Ray on this machine. Once the server is ready, yields its addresses and
    a function that raises TransientError if Ray can no longer serve.

    On exit, waits for requests in progress and stops Ray. If this process is killed, Ray's
    processes exit and its temporary folder is removed. Raises ChildProcessError if the server does
    not start.
    """
    with temporary_folder("kway-ray-") as folder:
        free = shutil.disk_usage(folder).free
        if free < _MIN_FREE_BYTES:
            raise OSError(
                f"{folder.parent} has {free / 2**20:.0f} MiB of free space, but Ray needs "
                f"{_MIN_FREE_BYTES / 2**20:.0f} MiB. Free some space, or set TMPDIR to another "
                "folder"
            )
        _set_environment(folder, config)
        try:
            _start(bundle, config)
            import ray

            # Ray restarts its other processes if they exit.
            daemons = [
                child
                for child in psutil.Process().children()
                if child.name() in ("gcs_server", "raylet")
            ]

            def check() -> None:
                if psutil.wait_procs(daemons, timeout=0)[0]:
                    raise TransientError("a daemon of Ray has exited. Start the server again")

            (node,) = ray.nodes()
            metrics = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            yield Addresses.of(config)._replace(metrics=metrics), check
        finally:
            _stop(config)


def _set_environment(folder: Path, config: ServingConfig) -> None:
    """Set the variables that Ray reads when it is first imported and that its processes inherit."""
    path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
    # Ray's own ports accept pickled objects, and each replica opens one on all interfaces.
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it takes precedence over the file
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        **variables(config),
        "PYTHONPATH": path,
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        # In the high-throughput mode, replicas that stop accept requests for this time, so that a
        # load balancer in front of Ray can remove them: by default 30 s.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        # With 0, Ray uses the loopback address of this machine on every system.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def _start(bundle: Path, config: ServingConfig) -> None:
    import ray
    from ray import serve
    from ray.exceptions import RayError

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # When a replica imports a module, it searches the driver's working directory first. A folder
    # data/ there would shadow kway's package of the same name.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with chdir(_PACKAGES):
            ray.init(
                address="local",  # do not join a cluster that is already running
                num_cpus=config.replica_limit,
                num_gpus=config.replica_limit if config.device == "cuda" else 0,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
            )
    except SystemExit as exited:
        if exited.code == signal.SIGTERM:  # Ray replaces the handler while it starts
            raise SystemExit(0) from None
        raise
    signal.signal(signal.SIGTERM, handler)
    from serving.ray_deployment import LOGGING, application

    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options=_http_options(config),
            grpc_options=None if config.grpc_port is None else _grpc_options(config.grpc_port),
            logging_config=LOGGING,
        )
        # Keep symbolic links: another target is another version.
        deployed = application(os.path.abspath(bundle), config, grace_seconds=_GRACE_SECONDS)
        serve.run(deployed, name=_NAME, logging_config=LOGGING)
    except (RuntimeError, RayError) as error:
        found = serve.status().applications.get(_NAME)
        messages = [one.message for one in found.deployments.values()] if found else []
        lines = "\n".join(messages or [str(error)]).splitlines()
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "unknown reason")
        raise ChildProcessError(f"the server did not start: {one_line(reason)}") from error


def _stop(config: ServingConfig) -> None:
    """Let requests in progress finish, then stop Ray."""
    import ray
    from ray import serve
    from ray.exceptions import RayError

    def shut_down() -> None:
        if ray.is_initialized():
            with suppress(RayError, RuntimeError, OSError):
                serve.delete(_NAME)
                # It also stops HAProxy, which does not exit with the process that started it.
                # Without HAProxy, Ray would report the end of its controller as an error.
                if config.high_throughput:
                    serve.shutdown()
            ray.shutdown()

    # Use a thread, because Ray blocks and does not react to signals if its controller hangs.
    thread = threading.Thread(target=shut_down, name="stop", daemon=True)
    thread.start()
    thread.join(_STOP_SECONDS)
    if thread.is_alive():
        print(f"error: Ray did not stop within {_STOP_SECONDS} s", file=sys.stderr, flush=True)
        for child in psutil.Process().children(recursive=True):
            if child.name() == "haproxy":  # does not exit with the process that started it
                child.kill()
        # Ray's exit handler would wait again. Its other processes exit when this one does.
        os._exit(1)
