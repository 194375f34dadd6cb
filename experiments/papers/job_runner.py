"""Run jobs on all cores or GPUs and store their results."""

import fcntl
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from io import TextIOWrapper
from pathlib import Path
from shutil import rmtree
from types import TracebackType
from typing import Self

from data.files import commit
from data.processes import die_with_parent
from experiments.papers.job import FOLDER, Folders, Job, Result, Results

# Called with the results so far and the number of jobs requested: at the start, after each result,
# and every `_SECONDS_BETWEEN_REPORTS` seconds while jobs are running.
Report = Callable[[Results, int], None]
_SECONDS_BETWEEN_REPORTS = 10


class JobRunner:
    """A pool of worker processes that run jobs.

    `data` is the user's folder. `out` contains results, shards and unfinished work, and is locked
    by the runner. Each of the `workers` processes runs one job at a time; if `workers` is 0, this
    process runs the jobs. Worker processes start with the first job and end with the runner. After
    an error, they are terminated, and the next run resumes their jobs.
    """

    def __init__(self, data: Path, out: Path, *, workers: int) -> None:
        self.data, self.out, self.workers = data, out, workers
        self._pool: ProcessPoolExecutor | None = None
        self._lock: TextIOWrapper

    def __enter__(self) -> Self:
        """Lock `out`. Raises ValueError if another runner has locked it."""
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock = (self.out / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(
                f"{self.out} is in use by another run: wait until it ends, or pass another --out"
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        try:
            self._end_workers(at_once=kind is not None)
        finally:
            self._lock.close()

    def _end_workers(self, *, at_once: bool) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(wait=not at_once, cancel_futures=True)
        if at_once:
            for process in multiprocessing.active_children():
                process.terminate()

    def measure(self, jobs: Sequence[Job], report: Report = lambda found, total: None) -> Results:
        """Return the results of all jobs, including stored ones.

        An exception in a job is raised again here; the results of jobs that finished before it are
        stored.
        """
        requested = dict.fromkeys(jobs)
        found = {job: result for job in requested if (result := self._stored(job)) is not None}
        report(found, len(requested))
        missing = [job for job in requested if job not in found]
        for measured in self._measured(missing):
            for job, result in measured.items():
                self._store(job, result)
            found |= measured
            report(found, len(requested))
        return found

    def _measured(self, jobs: Sequence[Job]) -> Iterator[Results]:
        """Yield results as jobs end and, from time to time in between, an empty dictionary."""
        if self.workers == 0:
            for job in jobs:
                yield {job: _work(job, self._folders(job))}
            return
        yield from self._in_parallel(
            [job for job in jobs if not job.alone], threads_of_a_job(max(1, self.workers))
        )
        for job in jobs:
            if job.alone:
                for measured in self._in_parallel([job], threads_of_a_job(1)):
                    # The other workers had to stay idle, so their time is charged to the job, too.
                    yield {
                        one: Result(result.measures, result.seconds * self.workers)
                        for one, result in measured.items()
                    }

    def _in_parallel(self, jobs: Sequence[Job], threads: int) -> Iterator[Results]:
        if not jobs:
            return
        pool = self._started()
        try:
            futures = {
                pool.submit(_work_with, threads, job, self._folders(job)): job for job in jobs
            }
            while futures:
                ended = wait(futures, _SECONDS_BETWEEN_REPORTS, FIRST_COMPLETED).done
                if not ended:
                    yield {}
                for future in ended:
                    yield {futures.pop(future): future.result()}
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a worker process was killed, possibly because memory ran out: to resume, run the "
                "same command again, with --workers 1 to use less memory"
            ) from error

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            devices = context.SimpleQueue()
            visible = visible_gpus()
            for number in range(self.workers):
                devices.put(visible[number % len(visible)] if visible else "")
            self._pool = ProcessPoolExecutor(
                self.workers,
                mp_context=context,
                initializer=_begin,
                initargs=(devices, os.getpid()),
            )
        return self._pool

    def _stored(self, job: Job) -> Result | None:
        path = self._path(job)
        if not path.is_file():
            return None
        stored = json.loads(path.read_text(encoding="utf-8"))
        shards = stored["measures"].get(FOLDER)
        if shards is not None and not (self.out / "shards" / shards).is_dir():
            return None
        return Result(stored["measures"], stored["seconds"])

    def _store(self, job: Job, result: Result) -> None:
        stored = {
            "function": job.function,
            "settings": job.settings,
            "measures": result.measures,
            "seconds": result.seconds,
        }
        path = self._path(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        commit(path, json.dumps(stored, indent=1).encode())
        rmtree(self._folders(job).work, ignore_errors=True)

    def _path(self, job: Job) -> Path:
        return self.out / "results" / f"{job.key}.json"

    def _folders(self, job: Job) -> Folders:
        return Folders(self.data, self.out / "shards", self.out / "work" / job.key)


def visible_gpus() -> list[str]:
    """Return the CUDA_VISIBLE_DEVICES names of the GPUs that this process may use."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_of_a_job(jobs_in_parallel: int) -> int:
    """Return OMP_NUM_THREADS if it is set, otherwise this job's share of the cores.

    Raises ValueError if OMP_NUM_THREADS is not a positive number.
    """
    text = os.environ.get("OMP_NUM_THREADS")
    if text is None:
        return max(1, cores() // jobs_in_parallel)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"OMP_NUM_THREADS is {text!r}: unset it, or set it to a number above 0")
    return int(text)


def _begin(devices: "multiprocessing.SimpleQueue[str]", parent: int) -> None:
    """Make at most one GPU visible to this worker: the trainer uses the first visible one."""
    die_with_parent(parent)
    if device := devices.get():
        os.environ["CUDA_VISIBLE_DEVICES"] = device


def _work_with(threads: int, job: Job, folders: Folders) -> Result:
    import torch

    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read by the trainer and by subprocesses of jobs
    return _work(job, folders)


def _work(job: Job, folders: Folders) -> Result:
    folders.work.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    measures = job.resolve()(job.settings, folders)
    return Result(measures, time.perf_counter() - start)
