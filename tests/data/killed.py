"""Killing a shard writer halfway and resuming it."""

import time
from pathlib import Path

import psutil

from data.shards.manifest import MANIFEST
from data.shards.writing.writer import write_shards
from data.sources import Source
from tests.ranks import forked


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder, keyed by file name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def check_killed_and_resumed(
    source: Source, folder: Path, *, samples_per_shard: int, workers: int
) -> None:
    """Kill a writer in its second shard, resume it, and check that it writes the same bytes as an
    uninterrupted writer.

    Also check that the first shard is not written again, and that no worker outlives its killed
    parent.
    """
    whole, out = folder / "whole", folder / "out"
    write_shards(source, whole, samples_per_shard=samples_per_shard, workers=1)
    process = forked(_write_slowly, source, out, samples_per_shard, workers)
    process.start()
    deadline = time.monotonic() + 60
    while not any(out.glob("train-000001.tar.*.aside")):
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = psutil.Process(process.pid).children()
    process.kill()
    process.join(60)
    assert not (out / MANIFEST).exists()
    first = (out / "train-000000.tar").stat().st_mtime_ns
    written = write_shards(source, out, samples_per_shard=samples_per_shard, workers=1)
    assert written.resumed == 1
    assert (out / "train-000000.tar").stat().st_mtime_ns == first
    assert contents(out) == contents(whole)
    _wait_for_end(children)


def _write_slowly(source: Source, out: Path, samples_per_shard: int, workers: int) -> None:
    write_shards(
        source,
        out,
        samples_per_shard=samples_per_shard,
        workers=workers,
        report=lambda done, total: time.sleep(0.05),
    )


def _wait_for_end(workers: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 20
    while not all(_ended(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)


def _ended(process: psutil.Process) -> bool:
    """Return whether a process has ended. It stays a zombie until its parent waits for it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
