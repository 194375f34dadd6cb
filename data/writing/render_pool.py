"""Samples of a source in the order of its tasks, made by several processes.

It knows nothing of shards. A worker ends with its parent, even with one that was killed.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from data.pool import end_with_parent, in_order, spawned
from data.skipped import Skipped
from data.sources.source import Sample, Source

_CHUNK = 64
_TASKS_A_WORKER = 2_000  # fewer do not repay the start of a process


def num_workers(asked: int | None, num_tasks: int) -> int:
    """`asked`, or one a core where there is enough to do."""
    if asked is not None:
        return asked
    return min(len(os.sched_getaffinity(0)), 1 + num_tasks // _TASKS_A_WORKER)


@contextmanager
def rendered(
    source: Source, tasks: Iterable[Any], workers: int
) -> Iterator[Iterator[Sample | Skipped]]:
    """Samples of `tasks`, in their order, made by `workers` processes (0, 1: in this one)."""
    if workers < 2:
        yield map(source.render, tasks)
        return
    chosen = iter(tasks)
    chunks = iter(lambda: list(islice(chosen, _CHUNK)), [])
    with spawned(workers, _start_worker, source) as pool:
        yield chain.from_iterable(in_order(pool, _render_chunk, chunks, ahead=4 * workers))


_source: Source


def _start_worker(source: Source) -> None:
    global _source
    _source = source
    end_with_parent()


def _render_chunk(tasks: list[Any]) -> list[Sample | Skipped]:
    return [_source.render(task) for task in tasks]
