"""Jobs on an existing Ray cluster.

kway must be installed on every node, and the nodes must share the files that the jobs read.
"""

import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, TypeVar

# By default, Ray tries for 14 minutes to connect to a server that is not a Ray cluster. It reads
# the variable when it is imported.
os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")

import ray
from ray.exceptions import AuthenticationError, RayError, RayTaskError

from data.messages import one_line
from data.retry import TransientError

Job = TypeVar("Job")
Result = TypeVar("Result")

_PACKAGES = Path(__file__).parents[1]
# A job whose worker or node is killed runs again, at most this many times. A preempted node kills
# all of its jobs, but a job that exhausts the memory of each node must not run forever.
_MAX_RETRIES = 10
_CONNECT_SECONDS = 10
_CANCEL_SECONDS = 10


def over_tasks(
    work: Callable[[Job], Result], jobs: Iterable[Job], address: str
) -> Iterator[Result]:
    """Yield `work(job)` for each job, in order. Ray tasks with one CPU each compute the results.

    When the caller stops, running tasks are canceled and waited for, so that they do not write
    files later. Raises the errors of `ray_cluster`.
    """
    with ray_cluster(address):
        num_cpus = sum(
            int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]
        )
        if not num_cpus:
            raise ValueError("the Ray cluster has no CPU: add a node with a CPU")
        task: Any = ray.remote(_call).options(num_cpus=1, max_retries=_MAX_RETRIES)
        # `work` often contains a source or options. It is sent to each node once.
        stored, running = ray.put(work), deque[Any]()
        try:
            for job in jobs:
                running.append(task.remote(stored, job, os.getcwd()))
                if len(running) > 2 * num_cpus:
                    yield ray.get(running.popleft())
            while running:
                yield ray.get(running.popleft())
        finally:
            for one in running:
                ray.cancel(one)
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=_CANCEL_SECONDS)


@contextmanager
def ray_cluster(address: str) -> Iterator[None]:
    """Connect to the cluster at `address` (HOST:PORT, or `auto` for the cluster of this machine).

    Errors of a job are raised unchanged. Raises ValueError if there is no such cluster, and
    TransientError if the cluster fails or a job was killed too often. The connection ends with the
    outermost of nested blocks.
    """
    is_outermost = not ray.is_initialized()
    if is_outermost:
        _connect(address)
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, ImportError):
            raise ValueError(
                f"a node of the Ray cluster {address} cannot import kway ({error.cause}): install "
                "the same version of kway on every node"
            ) from error
        raise error.cause from None
    except RayError as error:
        first = str(error).strip().partition("\n")[0]
        raise TransientError(
            f"the Ray cluster {address} failed ({first}): run the same command again"
        ) from error
    finally:
        if is_outermost:
            ray.shutdown()


def _connect(address: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if address != "auto":
            # If nothing is listening at HOST:PORT, Ray would wait for minutes.
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        # Workers search the driver's working directory for modules. A folder data/ there would
        # shadow kway's package of the same name.
        with chdir(_PACKAGES), _same_sigterm_handler():
            ray.init(address, log_to_driver=False, configure_logging=False)
    except (OSError, ValueError, AuthenticationError) as error:
        raise ValueError(
            f"--ray {address}: there is no such Ray cluster, or it does not accept the token: pass "
            "HOST:PORT of its head node, or run `ray start --head` and pass auto; set "
            "RAY_AUTH_TOKEN_PATH to the file with the token of the cluster"
        ) from error
    except RuntimeError as error:  # other versions of Ray or Python
        raise ValueError(f"--ray {address}: {one_line(error)}") from error


@contextmanager
def _same_sigterm_handler() -> Iterator[None]:
    """Restore the handler that `ray.init` replaces in the main thread. Ray's exits with code 15."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if current_thread() is main_thread():
        signal.signal(signal.SIGTERM, before)


def _call(work: Callable[[Job], Result], job: Job, folder: str) -> Result:
    with suppress(OSError):
        os.chdir(folder)  # relative paths are relative to the driver's working directory
    return work(job)
