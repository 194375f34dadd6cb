"""Runs jobs on all cores, or all GPUs, and keeps what they measure."""

import fcntl
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from io import TextIOWrapper
from pathlib import Path
from shutil import rmtree
from types import TracebackType
from typing import Self

from benchmarks.papers.job import FOLDER, Job, Places, Result, Results
from data.aside import commit
from data.pool import end_with_parent

Report = Callable[[int, int], None]


class Laboratory:
    """`out` holds results, shards and unfinished work, of one laboratory at a time; `data` is the
    user's.

    `workers` processes do a job each; 0: this one does them. They start with the first job and end
    with the laboratory, at once after an error: what they were doing is gone on with later.
    """

    def __init__(self, data: Path, out: Path, *, workers: int) -> None:
        self.data, self.out, self.workers = data, out, workers
        self._pool: ProcessPoolExecutor | None = None
        self._lock: TextIOWrapper

    def __enter__(self) -> Self:
        """ValueError where another laboratory has `out`."""
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock = (self.out / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(
                f"{self.out} is in use by another kway papers: wait for it, or name another --out"
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
        threads = max(1, cores() // self.workers)
        yield from self._at_once([job for job in jobs if not job.alone], threads)
        for job in jobs:
            if job.alone:
                for _, result in self._at_once([job], cores()):
                    # It had the machine to itself.
                    yield job, Result(result.measures, result.seconds * self.workers)

    def _at_once(self, jobs: Sequence[Job], threads: int) -> Iterator[tuple[Job, Result]]:
        if not jobs:
            return
        pool = self._started()
        try:
            futures = {
                pool.submit(_work_with, threads, job, self._places(job)): job for job in jobs
            }
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a worker was killed, perhaps for memory: the same command goes on with what was "
                "not measured yet, --workers 1 takes less"
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
                initargs=(devices,),
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


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each GPU that this process may use."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def _begin(devices: "multiprocessing.SimpleQueue[str]") -> None:
    """Each worker sees one GPU where there are any, for a trainer takes the first that it sees."""
    end_with_parent()
    if device := devices.get():
        os.environ["CUDA_VISIBLE_DEVICES"] = device


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
