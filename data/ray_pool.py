"""A process pool on an existing Ray cluster.

kway must be installed on every node, and the nodes must share the files that the jobs read.
"""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

# By default, Ray tries for 14 minutes to connect to a server that is not a Ray cluster. It reads
# the variable when it is imported.
os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")

import ray
from ray.exceptions import AuthenticationError, RayError, RayTaskError

from data.messages import one_line
from data.retry import TransientError

_PACKAGES = Path(__file__).parents[1]
# A job whose worker or node is killed runs again, at most this many times. A preempted node kills
# all of its jobs, but a job that exhausts the memory of each node must not run forever.
_MAX_RETRIES = 10
_CONNECT_SECONDS = 10
_CANCEL_SECONDS = 10


class RayPool(Executor):
    """Runs each job as a Ray task.

    - `cpus`: number of CPUs per job. No more than the largest node has.
    - `num_workers`: number of jobs that the cluster can run at the same time when the pool is
      created.
    """

    def __init__(self, *, cpus: int = 1) -> None:
        most = max(_cpus_of_nodes(), default=0)
        if not most:
            raise ValueError("the Ray cluster has no CPU: add a node with a CPU")
        self.cpus = min(cpus, most)
        self.num_workers = sum(cpus // self.cpus for cpus in _cpus_of_nodes())
        self._task = ray.remote(_call).options(num_cpus=self.cpus, max_retries=_MAX_RETRIES)
        self._stored: dict[Callable[..., Any], ray.ObjectRef[Any]] = {}
        self._running: set[ray.ObjectRef[Any]] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # `fn` often contains a source or options. They are sent to each node once.
        if fn not in self._stored:
            self._stored[fn] = ray.put(fn)
        job = self._task.remote(self._stored[fn], args, kwargs, os.getcwd())
        self._running.add(job)
        future: Future[Any] = job.future()
        future.add_done_callback(lambda done: self._running.discard(job))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """Cancel the jobs. With `wait`, also wait until those that are running have ended, so that
        they do not write files later.
        """
        jobs = list(self._running)
        for job in jobs:
            ray.cancel(job)
        if wait and jobs:
            ray.wait(jobs, num_returns=len(jobs), timeout=_CANCEL_SECONDS)


def _cpus_of_nodes() -> list[int]:
    """Return the number of CPUs of each node of the cluster."""
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]


@contextmanager
def ray_pool(address: str, *, cpus: int = 1) -> Iterator[RayPool]:
    """Like `ray_cluster`, but yields a pool. Unfinished jobs are canceled when the block ends."""
    with ray_cluster(address), RayPool(cpus=cpus) as pool:
        yield pool


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
        _check_head(address)
        # Workers search the driver's working directory for modules. A folder data/ there would
        # shadow kway's package of the same name.
        with chdir(_PACKAGES), _same_sigterm_handler():
            ray.init(address, log_to_driver=False, configure_logging=False)
    except AuthenticationError as error:
        raise ValueError(_rejected(address)) from error
    except (OSError, ValueError) as error:
        # If the cluster rejects the token, Ray only reports the traceback as text.
        if AuthenticationError.__name__ in str(error.__cause__):
            raise ValueError(_rejected(address)) from None
        raise ValueError(
            f"--ray {address}: there is no such Ray cluster: pass HOST:PORT of its head node, or "
            "run `ray start --head` and pass auto"
        ) from error
    except RuntimeError as error:  # other versions of Ray or Python
        raise ValueError(f"--ray {address}: {one_line(error)}") from error


def _rejected(address: str) -> str:
    return (
        f"--ray {address}: the token is missing or the Ray cluster does not accept it: set "
        "RAY_AUTH_TOKEN_PATH to the file with the token of the cluster"
    )


@contextmanager
def _same_sigterm_handler() -> Iterator[None]:
    """Restore the handler that `ray.init` replaces in the main thread. Ray's exits with code 15."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if current_thread() is main_thread():
        signal.signal(signal.SIGTERM, before)


def _check_head(address: str) -> None:
    """Raise OSError or ValueError if nothing is listening at HOST:PORT, for which Ray would wait
    for minutes."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def _call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], folder: str
) -> Any:
    with suppress(OSError):
        os.chdir(folder)  # relative paths are relative to the driver's working directory
    return fn(*args, **kwargs)
