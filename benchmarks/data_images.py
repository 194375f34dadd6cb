"""kway's loader compared with webdataset, grain and hand-written loops on the same image files.

All contenders take a random crop, resize it to 224 x 224 with the same functions, flip half of the
images and produce uint8 batches. CPU seconds include all threads of the process; there are no
loader processes.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import cv2
import numpy as np
import webdataset
from isal import isal_zlib
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.data_image_peers import (
    compiled_crop_and_skip,
    grain_batches,
    webdataset_batches,
    with_opencv,
    with_pillow,
    with_simplejpeg,
)
from benchmarks.data_tar_samples import TarSamples
from benchmarks.timing import Row, rate_row, share_row, take_turns
from data.config import DataConfig
from data.images.decode import checked_jpeg_header
from data.images.jpeg_crop import decoder
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.shards.split import Split, open_split
from data.shards.writing.writer import write_shards
from data.sources import ImageFolder

BATCH = 142
PACKED_SIDE = 256
READS = 20_000
# In the order of the functions that `compiled_crop_and_skip` returns.
CROP_AND_SKIP = [
    f"hand-written loop, libjpeg-turbo decodes only the crop, {kind} settings"
    for kind in ("fastest", "default")
]
# By peer: the target for the ratio of the loader's rate to the peer's rate on the same files.
TARGETS = {
    **dict.fromkeys(CROP_AND_SKIP, 0.95),
    "hand-written loop, simplejpeg": 1.0,
    "hand-written loop, OpenCV": 1.0,
    "webdataset + simplejpeg": 1.0,
    "webdataset + Pillow": 1.5,
    "grain + simplejpeg": 1.0,
}


def rows(images: Path | None) -> Iterator[Row]:
    """Compare decoding of the same files, in one process and with one worker, and reading alone."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if images is None:
            images = folder / "images"
            draw(images)
        labels = folder / "labels.csv"
        files = sorted(path for path in images.rglob("*") if path.suffix.lower() in _SUFFIXES)
        if not files:
            raise SystemExit(
                f"{images} contains no {' or '.join(_SUFFIXES)} files: pass a folder of JPEG files"
            )
        labels.write_text(
            "".join(f"{path.relative_to(images)},{path.stem}\n" for path in files),
            encoding="utf-8",
        )
        for name in ("original", "packed"):
            source = ImageFolder(
                images,
                labels=labels,
                short_side=PACKED_SIDE,
                original=name == "original",
                test_fraction=0,
            )
            write_shards(source, folder / name)
        with (
            open_split(folder / "original", "train") as originals,
            open_split(folder / "packed", "train") as packed,
        ):
            yield from _same_files(packed, f"packed at {PACKED_SIDE}")
            yield from _same_files(originals, "originals")
            yield _one_worker(packed)
            yield from _reading(originals)
            yield _packing(originals, packed)


_SUFFIXES = (".jpg", ".jpeg")


def draw(folder: Path, count: int = 142) -> None:
    """Write 500 x 375 images of smooth noise whose file sizes match those of photographs."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        image = np.zeros((375, 500, 3))
        for side in (4, 16, 64, 250):
            noise = rng.normal(size=(side * 3 // 4, side, 3))
            image += 40 * cv2.resize(noise, (500, 375), interpolation=cv2.INTER_CUBIC)
        pixels = np.clip(image + 128, 0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / f"{number:03d}.jpg"), pixels, [cv2.IMWRITE_JPEG_QUALITY, 90])


def _same_files(split: Split, files: str) -> Iterator[Row]:
    """Compare the loader with every peer in one process."""
    count, tars = _in_batches(len(split), 4), _tars(split)
    case = f"{len(split)} images, {files}, {_kilobytes(split)}"
    with ExitStack() as opened:
        folder = Path(opened.enter_context(TemporaryDirectory()))
        compiled = compiled_crop_and_skip(folder) or ()
        peers: dict[str, Iterator[object]] = {
            **{
                name: TarSamples(tars, sampled).batches(BATCH)
                for name, sampled in zip(CROP_AND_SKIP, compiled, strict=False)
            },
            "hand-written loop, simplejpeg": TarSamples(tars, with_simplejpeg).batches(BATCH),
            "hand-written loop, OpenCV": TarSamples(tars, with_opencv).batches(BATCH),
            "webdataset + simplejpeg": webdataset_batches(tars, with_simplejpeg, BATCH),
            "webdataset + Pillow": webdataset_batches(tars, with_pillow, BATCH),
            "grain + simplejpeg": grain_batches(tars, with_simplejpeg, BATCH),
        }
        batches = {"loader": opened.enter_context(_loader(split)), **peers}
        contenders = {name: _taking(iterator, count) for name, iterator in batches.items()}
        contenders["checks"] = partial(_check, split, count)
        times = take_turns(contenders, title=files, seconds=120, clock=time.process_time)
    for peer, at_least in TARGETS.items():
        if peer not in times:
            remedy = "requires a C compiler and libjpeg-turbo: apt-get install gcc libjpeg-dev"
            yield Row(f"loader / {peer}, same files", case, details=remedy)
            continue
        yield rate_row(
            f"loader / {peer}, same files",
            case,
            times["loader"],
            times[peer],
            at_least=at_least,
            count=count,
            unit="images/CPU-s",
        )
    checks = share_row(
        "checks of the bytes and the header",
        case,
        times["checks"],
        times["loader"],
        count=count,
        unit="image",
    )
    yield replace(checks, details=f"{checks.details}; decoder of crops: {decoder()}")


def _check(split: Split, count: int) -> None:
    """Perform the loader's checks that the peers lack, for samples that are in memory."""
    files = _files(split)
    for data in itertools.islice(itertools.cycle(files), count):
        isal_zlib.crc32(data)
        checked_jpeg_header(data)


@cache
def _files(split: Split) -> list[bytes]:
    return [split.read(index)[0] for index in range(len(split))]


def _packing(originals: Split, packed: Split) -> Row:
    """Measure the additional gain from packing. webdataset does not pack, so the files differ."""
    count = _in_batches(len(originals), 4)
    theirs = webdataset_batches(_tars(originals), with_pillow, BATCH)
    with _loader(packed) as loader:
        contenders = {"loader": _taking(loader, count), "webdataset": _taking(theirs, count)}
        times = take_turns(contenders, title="packing", seconds=60, clock=time.process_time)
    return rate_row(
        "loader, packed / webdataset + Pillow, originals: different files",
        f"{len(packed)} images, {_kilobytes(packed)} / {_kilobytes(originals)}",
        times["loader"],
        times["webdataset"],
        at_least=3.0,
        count=count,
        unit="images/CPU-s",
    )


def _one_worker(split: Split) -> Row:
    """Compare kway's loader with a DataLoader over the hand-written dataset, one worker each."""
    count = _in_batches(len(split), 12)
    dataset = TarSamples(_tars(split), with_opencv)
    theirs = DataLoader(
        dataset,
        batch_size=BATCH,
        sampler=RandomSampler(dataset, num_samples=10**9),  # no pause between epochs
        num_workers=1,
    )
    with _loader(split, workers=1) as loader:
        batches = {"loader": loader, "DataLoader": iter(theirs)}
        for iterator in batches.values():
            next(iterator)  # exclude the start-up of the processes
        contenders = {name: _taking(iterator, count) for name, iterator in batches.items()}
        times = take_turns(contenders, title="one worker", seconds=60)
    return rate_row(
        "loader / torch DataLoader over a hand-written dataset, one worker each, same files",
        f"{len(split)} images, packed at {PACKED_SIDE}, {_kilobytes(split)}",
        times["loader"],
        times["DataLoader"],
        at_least=0.85,
        count=count,
        unit="images/s",
    )


def _loader(split: Split, workers: int = 0) -> TrainLoader:
    config = DataConfig(shards=str(split.folder), workers=workers)
    return TrainLoader(split, config, global_batch=BATCH, cursor=Cursor(0))


def _taking(batches: Iterator[object], count: int) -> Callable[[], None]:
    """Return a function that takes batches until it has `count` images."""

    def take() -> None:
        for _ in range(count // BATCH):
            next(batches)

    return take


def _reading(split: Split) -> Iterator[Row]:
    """Compare random reads by index with sequential reads from the tar, without decoding."""
    order = random.Random(0).choices(range(len(split)), k=READS)
    by_hand = TarSamples(_tars(split), with_opencv)

    def by_index() -> None:
        for index in order:
            split.read(index)

    def by_offset() -> None:
        for index in order:
            by_hand.read(index)

    def in_sequence() -> None:
        dataset = webdataset.WebDataset(_tars(split), shardshuffle=False).repeat()
        for _ in itertools.islice(dataset, READS):
            pass

    contenders = {"index": by_index, "by hand": by_offset, "webdataset": in_sequence}
    times = take_turns(contenders, title="read", seconds=60)
    for peer, name, at_least in (
        ("webdataset", "webdataset in sequence", 5.0),
        ("by hand", "pread by a list of offsets, without checksums", None),
    ):
        yield rate_row(
            f"reading at random by index / {name}, same files",
            _kilobytes(split),
            times["index"],
            times[peer],
            at_least=at_least,
            count=READS,
            unit="samples/s",
        )


def _tars(split: Split) -> list[str]:
    return [split.folder.address(shard) for shard in split.manifest.of_split(split.name)]


def _kilobytes(split: Split) -> str:
    sizes = split.sizes(np.arange(len(split)))
    return f"{sizes.mean() / 1e3:.0f} kB each"


def _in_batches(samples: int, epochs: int) -> int:
    return max(1, samples * epochs // BATCH) * BATCH
