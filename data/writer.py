"""Source -> folder of webdataset shards with index and manifest, in a way that may be killed.

A shard appears whole or not at all, `manifest.json` comes last, and a second run of the same thing
goes on where the first one stopped. The bytes depend on the source alone, not on the workers.
"""

import fcntl
import hashlib
import os
import shutil
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import IO, Any

import numpy as np
from safetensors.numpy import save
from webdataset.writer import TarWriter

from data.index import LABEL_EXTENSION, IndexBuilder, index_path, open_index
from data.manifest import LABEL_VECTORS, MANIFEST, Manifest, ShardInfo, SourceInfo
from data.order import permuted_index
from data.sources.source import Sample, Source

# Present while a folder is not finished; says what it is becoming.
UNFINISHED = "unfinished.json"
_ASIDE = ".aside"
_CHUNK = 64
_TASKS_A_WORKER = 2_000  # fewer do not repay the start of a process

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Written:
    """What a run did. `resumed` shards stood already; `left_out` samples the source skipped."""

    manifest: Manifest
    complete_before: bool = False
    resumed: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class _Plan:
    file: str
    split: str
    tasks: Sequence[Any]


def write_shards(
    source: Source,
    folder: Path,
    *,
    samples_per_shard: int = 10_000,
    workers: int | None = None,
    report: Report = lambda done, total: None,
) -> Written:
    """Write `source` into `folder`, or go on with it; `report(done, total)` counts samples.

    workers: processes; None takes one a core where there is enough to do. Raises ValueError, and
    changes nothing, where the folder holds anything else; ValueError too for a bad sample, and then
    the unfinished shards are removed.
    """
    if samples_per_shard < 1:
        raise ValueError(f"samples per shard is {samples_per_shard}: it must be at least 1")
    about = source.describe()
    parameters = {**about.parameters, "samples_per_shard": samples_per_shard}
    about = SourceInfo(kind=about.kind, parameters=parameters)
    if (folder / MANIFEST).is_file():
        manifest = Manifest.load(folder)
        _check_same(folder, manifest.source, about)
        (folder / UNFINISHED).unlink(missing_ok=True)
        return Written(manifest, complete_before=True)
    with _claimed(folder, about):
        plans = list(_plans(source, samples_per_shard))
        shards, resumed = _write_plans(source, folder, plans, workers, report)
        vectors = source.label_vectors()
        if vectors is not None:
            _commit(folder / LABEL_VECTORS, save({"vectors": np.ascontiguousarray(vectors)}))
        manifest = Manifest(
            source=about,
            classes=source.classes(),
            shards=tuple(shards),
            label_vectors=None if vectors is None else LABEL_VECTORS,
        )
        _commit(folder / MANIFEST, manifest.model_dump_json(indent=1).encode() + b"\n")
    asked = sum(len(plan.tasks) for plan in plans)
    return Written(
        manifest, resumed=resumed, left_out=asked - sum(shard.samples for shard in shards)
    )


def _check_same(folder: Path, there: SourceInfo, asked: SourceInfo) -> None:
    if there != asked:
        raise ValueError(
            f"{folder} holds {there}, not {asked}: choose another folder, or delete this one"
        )


@contextmanager
def _claimed(folder: Path, about: SourceInfo) -> Iterator[None]:
    """Own `folder` while it is written: by a note of what it becomes, and a lock on that note."""
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / UNFINISHED
    if not note.exists():
        if others := sorted(path.name for path in folder.iterdir() if path.name != note.name):
            raise ValueError(
                f"{folder} holds something else ({others[0]}) and would become {about}: "
                "choose an empty folder"
            )
        _commit(note, about.model_dump_json(indent=1).encode())
    with note.open("rb") as held:
        _lock(held, folder)
        try:
            there = SourceInfo.model_validate_json(held.read())
        except ValueError as error:
            raise ValueError(f"{note} is damaged: delete {folder} and start again") from error
        _check_same(folder, there, about)
        try:
            yield
        except ValueError:
            # The input has to change, so what stands would never be gone on with.
            _discard(folder, remove_folder=new)
            raise
        for path in folder.glob(f"*{_ASIDE}"):
            path.unlink()
        note.unlink()


def _lock(file: IO[bytes], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{folder} is being written by another kway shard: wait for it") from error


def _discard(folder: Path, *, remove_folder: bool) -> None:
    if remove_folder:
        shutil.rmtree(folder)
        return
    for pattern in ("*.tar", "*.index.safetensors", f"*{_ASIDE}", LABEL_VECTORS, UNFINISHED):
        for path in folder.glob(pattern):
            path.unlink()


def _plans(source: Source, samples_per_shard: int) -> Iterator[_Plan]:
    """Which tasks go into which shard: mixed, so that a reader who streams sees all classes."""
    for split, tasks in source.splits().items():
        order = permuted_index(0, 0, np.arange(len(tasks)), len(tasks)).tolist()
        for number, start in enumerate(range(0, len(tasks), samples_per_shard)):
            part = [tasks[i] for i in order[start : start + samples_per_shard]]
            yield _Plan(f"{split}-{number:06d}.tar", split, part)


def _write_plans(
    source: Source, folder: Path, plans: list[_Plan], workers: int | None, report: Report
) -> tuple[list[ShardInfo], int]:
    total = sum(len(plan.tasks) for plan in plans)
    finished = {plan.file: info for plan in plans if (info := _finished(folder / plan.file))}
    missing = [plan for plan in plans if plan.file not in finished]
    done = total - sum(len(plan.tasks) for plan in missing)
    resumed = len(finished)
    tasks = (task for plan in missing for task in plan.tasks)
    with _rendered(source, tasks, _num_workers(workers, total - done)) as samples:
        for plan in missing:

            def count(row: int, done: int = done) -> None:
                report(done + row, total)

            info = _write_shard(folder / plan.file, plan, samples, count)
            done += len(plan.tasks)
            if info is not None:
                finished[plan.file] = info
    return [finished[plan.file] for plan in plans if plan.file in finished], resumed


def _finished(shard: Path) -> ShardInfo | None:
    """What stands of a shard; its index is renamed last, so with it the shard is whole."""
    if not index_path(shard).is_file():
        return None
    info = open_index(shard).info
    return info if shard.is_file() and shard.stat().st_size == info.bytes else None


def _write_shard(
    path: Path, plan: _Plan, samples: Iterator[Sample | None], count: Callable[[int], None]
) -> ShardInfo | None:
    """One tar and its index; None, and no file, where the source left out every sample."""
    index = IndexBuilder()
    aside = path.with_name(path.name + _ASIDE)
    with aside.open("wb") as file:
        with TarWriter(
            file, user="kway", group="kway", mode=0o644, mtime=0, encoder=False
        ) as writer:
            # webdataset means USTAR and yet opens the tar with Python's default, whose extra
            # headers for names that are not ASCII would stand between a header and its bytes.
            writer.tarstream.format = tarfile.USTAR_FORMAT
            for row, sample in enumerate(islice(samples, len(plan.tasks)), start=1):
                if sample is not None:
                    _add(writer, index, sample)
                count(row)
        _flush(file)
    if not len(index):
        aside.unlink()
        return None
    with aside.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    info = ShardInfo(
        file=path.name,
        split=plan.split,
        samples=len(index),
        bytes=aside.stat().st_size,
        sha256=digest,
    )
    aside.replace(path)
    _commit(index_path(path), index.to_bytes(info))
    return info


def _add(writer: TarWriter, index: IndexBuilder, sample: Sample) -> None:
    members = {sample.extension: sample.data, LABEL_EXTENSION: str(sample.label).encode()}
    offset = writer.tarstream.offset
    writer.write({"__key__": sample.key, **members})
    end = index.add(members, offset=offset, sample=sample.extension, label=sample.label)
    assert writer.tarstream.offset == end


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _commit(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole, or not at all, even after a power cut."""
    aside = path.with_name(path.name + _ASIDE)
    with aside.open("wb") as file:
        file.write(content)
        _flush(file)
    aside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _num_workers(asked: int | None, tasks: int) -> int:
    if asked is not None:
        return asked
    return min(len(os.sched_getaffinity(0)), 1 + tasks // _TASKS_A_WORKER)


@contextmanager
def _rendered(
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
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    # A killed parent leaves the pool's pipes open: without this its workers would wait for ever.
    Thread(target=end_with_parent, daemon=True).start()


def _render_chunk(tasks: list[Any]) -> list[Sample | None]:
    return [_source.render(task) for task in tasks]
