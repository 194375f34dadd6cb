"""Plans shards, and writes planned shards with processes of this machine or on a Ray cluster."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from data.loading.order import permuted_index
from data.processes import in_order
from data.shards.writing.output import OutputFolder
from data.shards.writing.shard_file import WrittenShard, write_shard
from data.skipped import Skipped
from data.sources.source import Sample, Source, num_workers, rendered

if TYPE_CHECKING:
    from data.ray_pool import RayPool

_CHOSEN_AT_ONCE = 1 << 14


@dataclass(frozen=True, slots=True)
class Plan:
    """A shard: positions [start, stop) in the shuffled order of a split."""

    file: str
    split: str
    of_split: Sequence[Any]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def tasks(self) -> Iterator[Any]:
        """Yield the samples in shuffled order, so that a streaming reader gets a mix of all
        classes.

        Positions are permuted in chunks as they are requested, so no list of the entire split is
        built.
        """
        total = len(self.of_split)
        for start in range(self.start, self.stop, _CHOSEN_AT_ONCE):
            positions = np.arange(start, min(start + _CHOSEN_AT_ONCE, self.stop))
            for i in permuted_index(0, 0, positions, total).tolist():
                yield self.of_split[i]


def plan_shards(source: Source, samples_per_shard: int) -> Iterator[Plan]:
    """Yield the shards to write, each with its range of samples.

    This requires about 100 bytes of memory per shard and none per sample.
    """
    for split, tasks in source.splits().items():
        if split.startswith(".") or "/" in split or "\\" in split:
            raise ValueError(f"split {split!r} would write outside the folder: rename it")
        for number, start in enumerate(range(0, len(tasks), samples_per_shard)):
            stop = min(start + samples_per_shard, len(tasks))
            yield Plan(f"{split}-{number:06d}.tar", split, tasks, start, stop)


Count = Callable[[int], None]
"""A callback that receives the number of samples written since the last call."""

Write = Callable[[Sequence[Plan], Count], Iterator[WrittenShard]]
"""Writes shards and yields the results in order."""


@contextmanager
def shard_writer(
    source: Source, output: OutputFolder, workers: int | None, ray: str | None
) -> Iterator[Write]:
    """Yield a function that writes shards, in this process or on a Ray cluster."""
    if ray is None:
        yield partial(_write_here, source, output, workers)
        return
    from data.ray_pool import ray_pool

    with ray_pool(ray) as pool:
        yield partial(_write_on_cluster, source, output, pool)


def _write_here(
    source: Source,
    output: OutputFolder,
    workers: int | None,
    plans: Sequence[Plan],
    count: Count,
) -> Iterator[WrittenShard]:
    """Write the shards in this process. `workers` processes render the samples."""
    tasks = (task for plan in plans for task in plan.tasks())
    num_samples = sum(len(plan) for plan in plans)
    with rendered(source, tasks, num_workers(workers, num_samples)) as samples:
        for plan in plans:
            of_shard = _counted(islice(samples, len(plan)), count)
            yield write_shard(output, plan.file, plan.split, of_shard)


def _counted(samples: Iterable[Sample | Skipped], count: Count) -> Iterator[Sample | Skipped]:
    """Yield `samples`, and call `count(1)` after each has been written."""
    for sample in samples:
        yield sample
        count(1)


class _Job(NamedTuple):
    """A shard to write on a Ray cluster."""

    file: str
    split: str
    tasks: list[Any]


def _write_on_cluster(
    source: Source, output: OutputFolder, pool: "RayPool", plans: Sequence[Plan], count: Count
) -> Iterator[WrittenShard]:
    """Write each shard in a Ray task, which receives only its own share of the source's tasks."""
    jobs = (_Job(plan.file, plan.split, list(plan.tasks())) for plan in plans)
    work = partial(_write_job, source, output)
    found = in_order(pool, work, jobs, ahead=2 * pool.num_workers)
    try:
        for plan, shard in zip(plans, found, strict=True):
            if shard.info is not None:
                output.check_visible(shard.info)
            count(len(plan))
            yield shard
    except ValueError:
        pool.shutdown()  # the files are deleted, so the tasks must not write more
        raise


def _write_job(source: Source, output: OutputFolder, job: _Job) -> WrittenShard:
    output.check_shared()
    return write_shard(output, job.file, job.split, map(source.render, job.tasks))
