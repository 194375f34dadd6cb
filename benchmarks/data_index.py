"""Cost of the offset indices of a split: memory, opening, and resuming at any position.

`python -m benchmarks.data_index` makes shards of 10,000 samples. All samples are the same small
image, because only the indices are measured. Numbers for 100,000,000 samples are extrapolated from
10,000,000.
"""

import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import cv2
import numpy as np

from benchmarks.machine import machine
from benchmarks.timing import CONSOLE, Row, print_rows
from data.config import DataConfig
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.shards.index import LABEL_EXTENSION, IndexBuilder, index_path
from data.shards.manifest import MANIFEST, ClassInfo, ShardInfo, SourceInfo
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.sources import Sample

SAMPLES_PER_SHARD = 10_000
BYTES_PER_SAMPLE = 4096  # larger than the tar headers of its two members
EXTRAPOLATED = 100_000_000
SAMPLES_PER_PAGE = 512  # reading one of these samples touches every page that training touches
BATCH = 256
ROUNDS = 5


class OneImage:
    """A source with a single image of 40 x 40 pixels."""

    modality = "image"

    def describe(self) -> SourceInfo:
        return SourceInfo(kind="one-image")

    def classes(self) -> tuple[ClassInfo, ...]:
        return (ClassInfo(name="all"),)

    def label_vectors(self) -> None:
        return None

    def splits(self) -> dict[str, Sequence[int]]:
        return {"train": range(1)}

    def render(self, task: int) -> Sample:
        noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        return Sample("0", cv2.imencode(".jpg", noise)[1].tobytes(), "jpg", 0)


def make_shards(folder: Path, samples: int) -> None:
    """Make shards that are links to one tar. All index entries point to its single image.

    The tar is extended as a sparse file to the smallest possible size for the number of samples.
    Its SHA-256 then no longer matches the manifest, but only `kway shard verify` checks it.
    """
    source = OneImage()
    manifest = write_shards(source, folder, workers=0).manifest
    (one,) = manifest.shards
    sample, builder = source.render(0), IndexBuilder()
    members = {sample.extension: sample.data, LABEL_EXTENSION: b"0"}
    for _ in range(SAMPLES_PER_SHARD):
        builder.add(members, offset=0, sample=sample.extension, label=0)
    size = SAMPLES_PER_SHARD * BYTES_PER_SAMPLE
    os.truncate(folder / one.file, size)
    about = {
        **one.model_dump(),
        "samples": SAMPLES_PER_SHARD,
        "bytes": size,
        "index_crc32": builder.crc32(),
    }
    shards = []
    for number in range(samples // SAMPLES_PER_SHARD):
        shards.append(ShardInfo(**{**about, "file": f"train-{number:06d}.tar"}))
        path = folder / shards[-1].file
        if number:
            path.hardlink_to(folder / one.file)
        index_path(path).write_bytes(builder.to_bytes(shards[-1]))
    complete = manifest.model_copy(update={"shards": tuple(shards)})
    (folder / MANIFEST).write_bytes(complete.to_bytes())


class Memory(NamedTuple):
    """Memory of this process in bytes: Rss and Pss of its index files, and private memory."""

    resident: int
    share: int
    own: int

    @classmethod
    def now(cls) -> "Memory":
        own = _summed(Path("/proc/self/smaps_rollup"), "", ("Private_Dirty",))
        return cls(*_summed(Path("/proc/self/smaps"), ".index.safetensors", ("Rss", "Pss")), *own)


def _summed(path: Path, ending: str, fields: Sequence[str]) -> list[int]:
    """Return the sums of `fields` in bytes over the mappings of files with this `ending`."""
    sums, counts = dict.fromkeys(fields, 0), False
    for line in path.read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            counts = line.endswith(ending)
        elif counts and name[:-1] in sums:
            sums[name[:-1]] += 1024 * int(values[0])
    return list(sums.values())


def _hold(folder: Path, pipe: Connection, together: Barrier) -> None:
    """Open the split, and read a sample from every page that training touches."""
    before, started = Memory.now(), time.perf_counter()
    with open_split(folder, "train") as split:
        seconds = time.perf_counter() - started
        opened = Memory.now()
        for i in range(0, len(split), SAMPLES_PER_PAGE):
            split.read(i)
        together.wait()
        pipe.send((seconds, before, opened, Memory.now()))
        together.wait()


def memory(folder: Path, samples: int) -> Iterator[Row]:
    """Measure two processes that read the same split, like two ranks on one machine."""
    context = get_context("spawn")
    together, pipes = context.Barrier(2), []
    for _ in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=_hold, args=(folder, theirs, together)).start()
        theirs.close()
        pipes.append(ours)
    (seconds, before, opened, read), (*_, other) = (pipe.recv() for pipe in pipes)
    factor, case = (
        EXTRAPOLATED / samples,
        f"{samples:,} samples, {samples // SAMPLES_PER_SHARD:,} shards",
    )
    yield Row(
        "open a split",
        case,
        f"{seconds:.2f} s",
        details=f"two processes in parallel; {EXTRAPOLATED:,}: {seconds * factor:.0f} s",
    )
    yield Row(
        "index in memory after opening",
        case,
        f"{opened.resident / 1e6:.0f} MB",
        details=f"{opened.resident / samples:.1f} bytes per sample; labels are checked",
    )
    shared = read.share + other.share
    for what, total in (
        ("index in memory after reading all of it, two processes", shared),
        ("the same, with private memory of the processes", shared + 2 * (read.own - before.own)),
    ):
        yield Row(
            f"{what}; {EXTRAPOLATED:,} samples",
            case,
            f"{total * factor / 1e9:.2f} GB",
            "< 2 GB",
            f"{total / 1e6:.0f} MB, {total / samples:.1f} bytes per sample; Rss of each process "
            f"{read.resident / 1e6:.0f} MB",
        )


def resume(folder: Path, samples: int) -> Iterator[Row]:
    """Time opening a split and loading the first batch at several positions of the stream."""
    config = DataConfig.model_validate({"shards": folder, "image": {"size": 32}})
    for epochs in (0, 0.25, 0.5, 0.999, 10.5):
        seconds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            cursor = Cursor(seed=0, samples=int(epochs * samples))
            with (
                open_split(folder, "train") as split,
                TrainLoader(split, config, global_batch=BATCH, cursor=cursor) as loader,
            ):
                assert len(next(loader).labels) == BATCH
                seconds.append(time.perf_counter() - started)
        yield Row(
            "resume to the first batch",
            f"{samples:,} samples, after {epochs:g} epochs",
            f"{np.median(seconds):.2f} s",
            "< 2 s",
            f"{BATCH} images; {min(seconds):.2f}-{max(seconds):.2f} s in {ROUNDS} rounds",
        )


def rows() -> Iterator[Row]:
    with TemporaryDirectory() as folder:
        make_shards(Path(folder, "large"), 10_000_000)
        yield from memory(Path(folder, "large"), 10_000_000)
        make_shards(Path(folder, "small"), 1_000_000)
        yield from resume(Path(folder, "small"), 1_000_000)


def main() -> None:
    CONSOLE.print(machine())
    print_rows(list(rows()))


if __name__ == "__main__":
    main()
