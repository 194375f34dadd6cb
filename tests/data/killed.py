"""Killing a shard writer halfway and resuming it."""

import time
from pathlib import Path
from typing import Any

import psutil

from data.shards.manifest import MANIFEST
from data.shards.writing.writer import write_shards
from data.skipped import Skipped
from data.sources import Sample, Source
from tests.ranks import forked
from tests.waiting import wait_until


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
    finished = out / "train-000000.index.safetensors"
    wait_until(lambda: finished.exists() and any(out.glob("*.aside")), possible=process.is_alive)
    children = psutil.Process(process.pid).children()
    process.kill()
    process.join(60)
    assert not (out / MANIFEST).exists()
    first = (out / "train-000000.tar").stat().st_mtime_ns
    written = write_shards(source, out, samples_per_shard=samples_per_shard, workers=1)
    assert 1 <= written.resumed < len(written.manifest.shards)
    assert (out / "train-000000.tar").stat().st_mtime_ns == first
    assert contents(out) == contents(whole)
    # No worker outlives its parent.
    wait_until(lambda: all(_ended(worker) for worker in children))


class _Slow:
    """Delays the samples of a source."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Slow, (self.source,)

    def render(self, task: Any) -> Sample | Skipped:
        time.sleep(0.03)
        return self.source.render(task)


def _write_slowly(source: Source, out: Path, samples_per_shard: int, workers: int) -> None:
    write_shards(_Slow(source), out, samples_per_shard=samples_per_shard, workers=workers)


def _ended(process: psutil.Process) -> bool:
    """Return whether a process has ended. It stays a zombie until its parent waits for it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
