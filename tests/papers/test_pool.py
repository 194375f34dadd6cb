"""Jobs of a runner in two worker processes."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.papers.job import Folders, Job, Measures
from experiments.papers.job_runner import JobRunner, cores
from tests.papers.counted import Doubling, doubling
from tests.waiting import wait_until

_WORKERS = 2


class Observing(Job):
    """A job that workers import from this module instead of experiments.papers."""

    def resolve(self) -> Any:
        return _observed


def _observed(settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Wait until the jobs in `awaits` have begun. Return times, process ID and thread count."""
    begun = time.monotonic()  # comparable across the processes of a machine
    number = settings["number"]
    (folders.data / f"begun-{number}").touch()
    wait_until(lambda: all((folders.data / f"begun-{n}").exists() for n in settings["awaits"]))
    time.sleep(0.1)
    return {
        "number": number,
        "begun": begun,
        "ended": time.monotonic(),
        "process": os.getpid(),
        "threads": torch.get_num_threads(),
        "variable": int(os.environ["OMP_NUM_THREADS"]),
    }


def observe(number: int, *, awaits: tuple[int, ...] = (), alone: bool = False) -> Job:
    return Observing("observed", {"number": number, "awaits": list(awaits)}, alone=alone)


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobRunner]:
    data = tmp_path_factory.mktemp("pool")
    with JobRunner(data, data / "out", workers=_WORKERS) as opened:
        # Start both workers here, because a test must not leave processes that it has started.
        opened.measure([observe(101, awaits=(102,)), observe(102, awaits=(101,))])
        yield opened


def test_parallel_jobs_share_the_cores_and_exclusive_jobs_use_all(
    runner: JobRunner,
) -> None:
    # Each of the first two ends only when the other has begun.
    together = [observe(1, awaits=(2,)), observe(2, awaits=(1,))]
    alone = [observe(number, alone=True) for number in (3, 4, 5)]
    reports: list[tuple[int, int]] = []
    found = runner.measure(
        [alone[0], *together, *alone[1:]],
        lambda found, total: reports.append((len(found), total)),
    )

    assert [found[job]["number"] for job in (*together, *alone)] == [1, 2, 3, 4, 5]
    # A slow start can be reported several times.
    assert list(dict.fromkeys(reports)) == [(done, 5) for done in range(6)]
    assert len({found[job]["process"] for job in together} - {os.getpid()}) == _WORKERS
    share = max(1, cores() // _WORKERS)
    for jobs, threads in ((together, share), (alone, cores())):
        assert {found[job]["threads"] for job in jobs} == {threads}
        assert {found[job]["variable"] for job in jobs} == {threads}

    ended = max(found[job]["ended"] for job in together)
    for job in alone:
        assert found[job]["begun"] >= ended
        ended = found[job]["ended"]
        # The budget is charged for all workers.
        duration = found[job]["ended"] - found[job]["begun"]
        assert found[job].seconds >= _WORKERS * duration


def test_jobs_use_omp_num_threads(runner: JobRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    jobs = [observe(11), observe(12, alone=True)]
    found = runner.measure(jobs)
    for job in jobs:
        assert (found[job]["threads"], found[job]["variable"]) == (3, 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(ValueError, match="OMP_NUM_THREADS is 'many'"):
        runner.measure([observe(13)])


def test_an_error_in_a_worker_is_raised_and_the_pool_continues(
    runner: JobRunner,
) -> None:
    with pytest.raises(KeyError, match="number"):
        runner.measure([Doubling("double", {})])
    assert runner.measure([doubling(7)])[doubling(7)]["double"] == 14


def test_a_killed_worker_raises_a_one_line_error_and_keeps_stored_results(tmp_path: Path) -> None:
    first, other = doubling(1), doubling(2)
    killed = doubling(3, kills_after=first)
    with (
        pytest.raises(
            ChildProcessError, match=r"a worker process was killed.* --workers 1"
        ) as caught,
        JobRunner(tmp_path, tmp_path / "out", workers=_WORKERS) as runner,
    ):
        runner.measure([first, killed])
    assert "\n" not in str(caught.value)

    # Run again without the job that killed the worker: only the job without a result runs.
    (tmp_path / "done").write_text("")
    with JobRunner(tmp_path, tmp_path / "out", workers=0) as runner:
        found = runner.measure([first, other])
    assert [found[job]["double"] for job in (first, other)] == [2, 4]
    assert (tmp_path / "done").read_text().split() == ["2"]
