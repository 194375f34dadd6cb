"""Samples of a source in the order of its tasks, made by several processes.

It knows nothing of shards. A worker ends with its parent, even with one that was killed.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from typing import Any

from data.inspection.shard_pool import end_with_parent
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
) -> Iterator[Iterator[Sample | None]]:
    """Samples of `tasks`, in their order, made by `workers` processes (0, 1: in this one)."""
    if workers < 2:
        yield map(source.render, tasks)
        return
    # Spawned, not forked: image libraries and callers hold threads and locks.
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=_start_worker, initargs=(source,)
    )
    try:
        yield _in_order(pool, iter(tasks), ahead=4 * workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, tasks: Iterator[Any], *, ahead: int
) -> Iterator[Sample | None]:
    running: deque[Future[list[Sample | None]]] = deque()
    chunks = iter(lambda: list(islice(tasks, _CHUNK)), [])
    for chunk in chunks:
        running.append(pool.submit(_render_chunk, chunk))
        if len(running) > ahead:
            yield from running.popleft().result()
    while running:
        yield from running.popleft().result()


_source: Source


def _start_worker(source: Source) -> None:
    global _source
    _source = source
    end_with_parent()


def _render_chunk(tasks: list[Any]) -> list[Sample | None]:
    return [_source.render(task) for task in tasks]
