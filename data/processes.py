"""Child processes: parallel jobs, processes that exit when their parent does, and signals that the
parent ignores."""

import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from data.retry import TransientError

Job = TypeVar("Job")
Result = TypeVar("Result")

_BYTES_PER_WORKER = 1 << 28  # for fewer bytes, starting a process is not worthwhile
_PR_SET_PDEATHSIG = 1


def over_jobs(
    work: Callable[[Job], Result],
    jobs: Iterable[Job],
    *,
    total_bytes: int = 0,
    workers: int | None,
    ray: str | None = None,
) -> Iterator[Result]:
    """Yield `work(job)` for each job, in order. `workers` processes compute the results.

    workers: the number of processes. With 0 or 1, this process runs the jobs. None selects one
    process per core if there is enough to read. ray: the address of a Ray cluster that runs the
    jobs instead. `work` must be picklable, such as a module-level function.
    """
    if ray is not None:
        from data.ray_pool import over_tasks

        yield from over_tasks(work, jobs, ray)
        return
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), 1 + total_bytes // _BYTES_PER_WORKER)
    if workers < 2:
        yield from map(work, jobs)
        return
    # Processes are spawned, not forked, because image libraries and callers use threads and locks.
    # `work` may contain a class list, so each process receives it once, not with every job.
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=_begin, initargs=(work, os.getpid())
    )
    try:
        yield from in_order(pool, _work, jobs, ahead=2 * workers)
    except BrokenProcessPool as error:
        raise TransientError(
            "a worker process was killed, possibly because it ran out of memory: run the same "
            "command again, or lower --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_given: list[Callable[[Any], Any]] = []


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    # The pool's pipes stay open if the parent is killed, so its workers would wait forever.
    die_with_parent(parent)
    _given[:] = [work]


def _work(job: Any) -> Any:
    return _given[0](job)


def in_order(
    pool: Executor, work: Callable[[Job], Result], jobs: Iterable[Job], *, ahead: int
) -> Iterator[Result]:
    """Yield `work(job)` for each job, in order. Up to `ahead` jobs are submitted in advance."""
    running: deque[Future[Result]] = deque()
    for job in jobs:
        running.append(pool.submit(work, job))
        if len(running) > ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def handled_signals(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals to handle: SIGTERM, and those that the parent did not ignore.

    A shell starts the background jobs of a script with SIGINT ignored, so that Ctrl-C stops only
    the script, and nohup ignores SIGHUP. kway does not change that.
    """
    return [n for n in numbers if n == signal.SIGTERM or signal.getsignal(n) != signal.SIG_IGN]


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when the thread that started it ends (Linux).

    parent: the expected parent process ID. If this process already has a different parent, the
    expected one exited before `prctl` took effect, and this process kills itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
