"""Runs jobs on all cores, or all GPUs, and keeps what they measure."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from shutil import rmtree
from types import TracebackType
from typing import Self

from benchmarks.papers.job import FOLDER, Job, Places, Result, Results
from data.aside import commit
from data.parent import die_with_parent

Report = Callable[[int, int], None]


class Laboratory:
    """`out` holds results, shards and unfinished work; `data` is the user's. For one process.

    `workers` processes do a job each; 0: this one does them. They start with the first job and end
    with the laboratory, at once after an error: what they were doing is gone on with later.
    """

    def __init__(self, data: Path, out: Path, *, workers: int) -> None:
        self.data, self.out, self.workers = data, out, workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
        if kind is not None:
            for process in multiprocessing.active_children():
                process.terminate()

    def measure(self, jobs: Sequence[Job], report: Report = lambda done, total: None) -> Results:
        """Results of all jobs, each measured now or before. Raises what a job raises; the results
        of those that ended before are kept."""
        found = {job: result for job in jobs if (result := self._kept(job)) is not None}
        missing = [job for job in dict.fromkeys(jobs) if job not in found]
        for job, result in self._measured(missing):
            self._keep(job, result)
            found[job] = result
            report(len(found), len(set(jobs)))
        return found

    def _measured(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Result]]:
        if self.workers == 0:
            for job in jobs:
                yield job, _work(job, self._places(job))
            return
        threads = max(1, (os.cpu_count() or 1) // self.workers)
        yield from self._at_once([job for job in jobs if not job.alone], threads)
        for job in jobs:
            if job.alone:
                for _, result in self._at_once([job], os.cpu_count() or 1):
                    # It had the machine to itself.
                    yield job, Result(result.measures, result.seconds * self.workers)

    def _at_once(self, jobs: Sequence[Job], threads: int) -> Iterator[tuple[Job, Result]]:
        if not jobs:
            return
        pool = self._started()
        futures = {pool.submit(_work_with, threads, job, self._places(job)): job for job in jobs}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool as error:
                raise ChildProcessError(
                    "a worker was killed, perhaps for memory: the same command goes on with what "
                    "was not measured yet, --workers 1 takes less"
                ) from error

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            numbers = context.SimpleQueue()
            for number in range(self.workers):
                numbers.put(number)
            self._pool = ProcessPoolExecutor(
                self.workers,
                mp_context=context,
                initializer=_begin,
                initargs=(numbers, os.getpid()),
            )
        return self._pool

    def _kept(self, job: Job) -> Result | None:
        path = self._path(job)
        if not path.is_file():
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        made = kept["measures"].get(FOLDER)
        if made is not None and not (self.out / "shards" / made).is_dir():
            return None
        return Result(kept["measures"], kept["seconds"])

    def _keep(self, job: Job, result: Result) -> None:
        kept = {
            "function": job.function,
            "settings": job.settings,
            "measures": result.measures,
            "seconds": result.seconds,
        }
        path = self._path(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        commit(path, json.dumps(kept, indent=1).encode())
        rmtree(self._places(job).work, ignore_errors=True)

    def _path(self, job: Job) -> Path:
        return self.out / "results" / f"{job.key}.json"

    def _places(self, job: Job) -> Places:
        return Places(self.data, self.out / "shards", self.out / "work" / job.key)


def _begin(numbers: "multiprocessing.SimpleQueue[int]", parent: int) -> None:
    """Each worker has a GPU of its own where there are any, and ends with this process, though
    that be killed."""
    import torch

    die_with_parent(parent)
    number = numbers.get()
    if (count := torch.cuda.device_count()) > 0:
        torch.cuda.set_device(number % count)


def _work_with(threads: int, job: Job, places: Places) -> Result:
    import torch

    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # the trainer asks it, and processes of a job
    return _work(job, places)


def _work(job: Job, places: Places) -> Result:
    places.work.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    measures = job.resolve()(job.settings, places)
    return Result(measures, time.perf_counter() - start)
