"""Runs jobs on all cores, or all GPUs, and keeps what they measure."""

import fcntl
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from shutil import rmtree
from types import TracebackType
from typing import Self

from benchmarks.papers.job import FOLDER, Job, Places, Result, Results
from benchmarks.papers.provenance import Provenance, outdated
from data.files import commit
from data.processes import end_with_parent

# Called with the results so far and the number asked for: at the start, after each result, and
# every `_SECONDS_BETWEEN_REPORTS` while jobs run.
Report = Callable[[Results, int], None]
_SECONDS_BETWEEN_REPORTS = 10


class Laboratory:
    """`out` contains results, shards and unfinished work, for one laboratory at a time; `data` is
    the user's.

    `workers` processes run one job each; 0: this process runs them. They start with the first job
    and end with the laboratory, immediately after an error: the next run resumes their jobs.
    `again`: measure again what is kept from older code, another torch or another machine.
    """

    def __init__(self, data: Path, out: Path, *, workers: int, again: bool = False) -> None:
        self.data, self.out, self.workers, self.again = data, out, workers, again
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
                f"{self.out} is in use by another run: wait for it, or name another --out"
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
        """Results of all jobs, each measured now or before. Raises what a job raises; the results
        of the jobs that ended before it are kept."""
        asked = dict.fromkeys(jobs)
        found = {job: result for job in asked if (result := self._kept(job)) is not None}
        report(found, len(asked))
        missing = [job for job in asked if job not in found]
        # Before they start: the files may be edited while jobs run.
        provenance = {job: self._provenance(job) for job in missing}
        for measured in self._measured(missing):
            for job, result in measured.items():
                self._keep(job, result, provenance[job])
            found |= measured
            report(found, len(asked))
        return found

    def _measured(self, jobs: Sequence[Job]) -> Iterator[Results]:
        """Results as jobs end, and empty ones from time to time while they run."""
        if self.workers == 0:
            for job in jobs:
                yield {job: _work(job, self._places(job))}
            return
        yield from self._in_parallel(
            [job for job in jobs if not job.alone], threads_of_a_job(max(1, self.workers))
        )
        for job in jobs:
            if job.alone:
                for measured in self._in_parallel([job], threads_of_a_job(1)):
                    # No other worker ran at the same time, so the job is charged for all of them.
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
                pool.submit(_work_with, threads, job, self._places(job)): job for job in jobs
            }
            while futures:
                ended = wait(futures, _SECONDS_BETWEEN_REPORTS, FIRST_COMPLETED).done
                if not ended:
                    yield {}
                for future in ended:
                    yield {futures.pop(future): future.result()}
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a worker was killed, perhaps because memory ran out: run the same command again "
                "to resume; --workers 1 needs less memory"
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
        if self.again and outdated(kept):
            if made is not None:
                rmtree(self.out / "shards" / made)  # whole shards would not be written again
            return None
        return Result(kept["measures"], kept["seconds"])

    def _provenance(self, job: Job) -> Provenance:
        """That of the code that starts the job, or that started it where it was interrupted: it
        resumes its work."""
        work = self._places(job).work
        note = _note(work)
        if work.is_dir() and note.is_file():
            earlier = Provenance(**json.loads(note.read_text(encoding="utf-8")))
            if not (self.again and earlier.outdated()):
                return earlier
            rmtree(work)
        now = Provenance.of(job)
        note.parent.mkdir(parents=True, exist_ok=True)
        commit(note, json.dumps(asdict(now)).encode())
        return now

    def _keep(self, job: Job, result: Result, provenance: Provenance) -> None:
        kept = {
            "function": job.function,
            "settings": job.settings,
            "provenance": asdict(provenance),
            "measures": result.measures,
            "seconds": result.seconds,
        }
        path = self._path(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        commit(path, json.dumps(kept, indent=1).encode())
        work = self._places(job).work
        rmtree(work, ignore_errors=True)
        _note(work).unlink(missing_ok=True)

    def _path(self, job: Job) -> Path:
        return result_path(self.out, job.key)

    def _places(self, job: Job) -> Places:
        return Places(self.data, self.out / "shards", self.out / "work" / job.key)


def _note(work: Path) -> Path:
    """Where the provenance of an unfinished job with this folder is kept."""
    return work.with_name(f"{work.name}.json")


def result_path(out: Path, key: str) -> Path:
    """The file of the kept result of the job with this key."""
    return out / "results" / f"{key}.json"


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each GPU that this process may use."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_of_a_job(jobs_in_parallel: int) -> int:
    """OMP_NUM_THREADS if it is set, otherwise this job's share of the cores.

    Raises ValueError for an OMP_NUM_THREADS that is not a positive number.
    """
    text = os.environ.get("OMP_NUM_THREADS")
    if text is None:
        return max(1, cores() // jobs_in_parallel)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"OMP_NUM_THREADS is {text!r}: unset it, or set it to a number above 0")
    return int(text)


def _begin(devices: "multiprocessing.SimpleQueue[str]") -> None:
    """Each worker sees at most one GPU, because a trainer takes the first that it sees."""
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
