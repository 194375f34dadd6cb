"""All of Ray's private names that kway uses, and why it uses them. `pyproject.toml` caps Ray's
version.

Ray 2.60 has no public option for any of these. Each function raises RuntimeError if the installed
Ray no longer has the name; `tests/serving/test_private_names.py` checks all of them.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Names a function that every worker process calls when it starts. The public form,
# `ray.init(runtime_env={"worker_process_setup_hook": ...})`, sets this variable too, but then each
# worker also waits for the creation of a runtime environment. Ray's own constant for the name is
# not imported, because Ray reads its environment variables on import.
WORKER_SETUP_HOOK_VARIABLE = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"


def hide_pandas() -> None:
    """Prevent Ray Serve from importing pandas in this process, as if it were not installed.

    `ray.serve._private.utils` imports pandas, and with it pyarrow, only to encode data frames. They
    take 35 MB in each of Ray's processes. Python raises ImportError for a module that is None in
    `sys.modules`.
    """
    sys.modules.setdefault("pandas", None)  # type: ignore[arg-type]


def unhide_pandas() -> None:
    """Allow this process to import pandas again. Call it after Ray Serve has been imported."""
    if sys.modules.get("pandas") is None:
        sys.modules.pop("pandas", None)


def check_replicas_use_uvicorn() -> None:
    """Raise RuntimeError unless a replica creates its server with `uvicorn.Config`, which kway
    patches.

    `ray.serve.config.HTTPOptions` does not expose uvicorn's options.
    """
    import uvicorn

    start = _required("ray.serve._private.http_util", "start_asgi_http_server")
    if start.__globals__.get("uvicorn") is not uvicorn or "Config" not in start.__code__.co_names:
        raise _changed("start_asgi_http_server does not create a uvicorn.Config")


def ongoing_requests_of(server: Any) -> Callable[[int], None]:
    """Return a function that adds to the number of a replica's requests in progress.

    Ray scales by this number, and waits for it to become 0 before it stops a replica. `server` is
    the application that Ray passes to the innermost middleware of the replica's HTTP server.
    """
    protocol = _required("ray.serve._private.common", "RequestProtocol").HTTP
    metadata = _required("ray.serve._private.common", "RequestMetadata")
    replica = getattr(getattr(server, "_app", None), "__self__", None)
    metrics = getattr(replica, "_metrics_manager", None)
    change = getattr(metrics, "_change_num_ongoing_requests", None)
    if change is None:
        raise _changed("a replica's HTTP server does not lead to its count of requests")
    request = metadata("", "", _request_protocol=protocol, is_direct_ingress=True)
    return functools.partial(change, request)


@contextmanager
def own_process_groups() -> Iterator[None]:
    """Start Ray's daemons outside our process group.

    Terminals, `timeout` and other tools send signals to the entire group. If the daemons were in
    it, they would exit at the same time as this process instead of in order, and Ray would then
    wait a minute for them. Earlier versions of Ray started the daemons in separate sessions
    (ray-project/ray#6008); Ray now only blocks SIGINT in them.
    """
    services = importlib.import_module("ray._private.services")
    start = _required(services.__name__, "ConsolePopen")
    if "ConsolePopen" not in _required(services.__name__, "start_ray_process").__code__.co_names:
        raise _changed("start_ray_process does not call ConsolePopen")
    services.ConsolePopen = functools.partial(start, process_group=0)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        services.ConsolePopen = start  # type: ignore[attr-defined]


@contextmanager
def without_unused_daemons() -> Iterator[None]:
    """Start Ray without its autoscaler, log monitor and dashboard.

    A server on one machine uses none of them, and together they take 170 MB. `ray start` has
    options for the first two, but `ray.init` does not. With `include_dashboard=False`, Ray still
    starts the dashboard, only to report usage statistics.
    """
    services = importlib.import_module("ray._private.services")
    parameter = importlib.import_module("ray._private.parameter")
    start, params = _required(services.__name__, "start_api_server"), parameter.RayParams
    options = {"no_monitor": True, "include_log_monitor": False}
    if not options.keys() <= inspect.signature(params).parameters.keys():
        raise _changed(f"RayParams does not have the parameters {', '.join(options)}")
    parameter.RayParams = functools.partial(params, **options)  # type: ignore[attr-defined]
    # The result is that of a dashboard without a URL and without a process.
    services.start_api_server = lambda *_, **__: ("", None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        services.start_api_server = start  # type: ignore[attr-defined]
        parameter.RayParams = params  # type: ignore[attr-defined]


def local_options(address: str, temp_folder: str) -> dict[str, Any]:
    """Return the arguments of `ray.init` whose names begin with an underscore.

    They set the node's address, the folder for all of its files, and the interval between metric
    reports.
    """
    return {
        "_node_ip_address": address,
        "_temp_dir": temp_folder,
        "_system_config": {"metrics_report_interval_ms": 1000},
    }


def _required(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _changed(str(error)) from error


def _changed(reason: str) -> RuntimeError:
    import ray

    return RuntimeError(f"Ray {ray.__version__} is not supported: {reason}. Install Ray 2.60")
