"""Time and memory to open a split of 10,000,000 samples, look up samples and load a first batch.

The shards are links to one tar of 10,000 images, because only their indices matter:

    python -m benchmarks.data_index FOLDER 10000000 0.5     # one measurement, in a new process
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import cv2
import numpy as np

from benchmarks.data_peers import SMALL_SIDE
from benchmarks.timing import Row, numbers_of_a_process, resident
from data.config import DataConfig
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.shards.manifest import MANIFEST
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.sources import ImageFolder

SAMPLES, SAMPLES_PER_SHARD, BATCH = 10_000_000, 10_000, 256
EPOCHS = (0, 0.25, 0.5, 0.999, 10.5)  # the positions of the first batch


def draw_small(folder: Path, count: int) -> None:
    """Write PNGs of smooth noise in ten classes."""
    rng = np.random.default_rng(0)
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
    for number in range(count):
        noise = rng.normal(128, 40, (8, 8, 3))
        image = cv2.resize(noise, (SMALL_SIDE, SMALL_SIDE), interpolation=cv2.INTER_CUBIC)
        path = folder / str(number % 10) / f"{number}.png"
        cv2.imwrite(str(path), np.clip(image, 0, 255).astype(np.uint8))


def make_shards(folder: Path, samples: int) -> None:
    """Write one shard, and add links to it to the manifest until it has enough samples.

    The indices differ in the name of the shard that they contain.
    """
    with TemporaryDirectory() as images:
        draw_small(Path(images), SAMPLES_PER_SHARD)
        source = ImageFolder(images, test_fraction=0)
        written = write_shards(source, folder, samples_per_shard=SAMPLES_PER_SHARD)
    (one,) = written.manifest.shards
    tar, shards = folder / one.file, []
    beside = sorted(folder.glob(f"{tar.stem}.*"))
    for number in range(samples // SAMPLES_PER_SHARD):
        stem = f"train-{number:0{len(tar.stem) - len('train-')}d}"  # as long as the first
        shards.append(one.model_copy(update={"file": stem + tar.suffix}))
        for path in beside if number else ():
            copied = folder / path.name.replace(tar.stem, stem)
            if path == tar:
                copied.hardlink_to(path)
            else:
                copied.write_bytes(path.read_bytes().replace(tar.stem.encode(), stem.encode()))
    manifest = written.manifest.model_copy(update={"shards": tuple(shards)})
    (folder / MANIFEST).write_bytes(manifest.to_bytes())


def rows() -> Iterator[Row]:
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "shards"
        make_shards(folder, SAMPLES)
        found = np.array(
            [
                numbers_of_a_process("benchmarks.data_index", str(folder), str(int(e * SAMPLES)))
                for e in EPOCHS
            ]
        )
    opening, memory, lookup, first = np.median(found, axis=0)
    case = f"{SAMPLES:,} samples, {SAMPLES // SAMPLES_PER_SHARD:,} shards"
    yield Row("open a split", case, f"{opening:.2f} s", "<= 1 s")
    yield Row(
        "extra memory after opening it and the first batch", case, f"{memory:.0f} MB", "<= 150 MB"
    )
    yield Row("look up a sample of a random batch", case, f"{lookup:.2f} CPU-µs", "<= 1")
    slowest = found[:, 3].max()
    details = f"after {', '.join(map(str, EPOCHS))} epochs; median {first:.2f} s"
    yield Row("first batch anywhere, slowest", case, f"{slowest:.2f} s", "<= 0.3 s", details)


def measure(folder: Path, position: int) -> tuple[float, ...]:
    """Return the seconds to open the split, the MB of memory that it and the first batch take, the
    CPU microseconds to look up a sample, and the seconds to load the first batch at `position`."""
    config = DataConfig.model_validate({"shards": folder, "image": {"size": 32}, "workers": 0})
    before, started = resident("VmRSS"), time.perf_counter()
    with open_split(folder, "train") as split:
        opening, started = time.perf_counter() - started, time.perf_counter()
        cursor = Cursor(seed=0, samples=position)
        with TrainLoader(split, config, global_batch=BATCH, cursor=cursor) as loader:
            assert len(next(loader).labels) == BATCH
            first = time.perf_counter() - started
        memory = (resident("VmRSS") - before) / 1e6
        lookups = np.random.default_rng(0).integers(len(split), size=(100, BATCH))
        started = time.process_time()
        for indices in lookups:
            split.read_many(indices)  # reads no samples until its iterator is used
        lookup = 1e6 * (time.process_time() - started) / lookups.size
    return opening, memory, lookup, first


if __name__ == "__main__":
    print(*measure(Path(sys.argv[1]), int(sys.argv[2])))
