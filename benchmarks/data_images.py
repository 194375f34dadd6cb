"""kway's loader compared with hand-written loops and webdataset on the same image files.

CPU seconds include all threads of the process; there are no loader processes.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory

import cv2
import numpy as np

from benchmarks import data_peers
from benchmarks.data_peers import PAD, SMALL_SIDE, images, loop, webdataset_loop
from benchmarks.timing import Row, rate_row, take_turns
from data.augment.training import AugmentConfig
from data.config import DataConfig
from data.images.config import ImageConfig
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.shards.split import Split, open_split
from data.shards.writing.writer import write_shards
from data.sources import ImageFolder

PACKED_SIDE, NUM_DRAWN, EPOCHS = 256, 142, 4
NUM_SMALL, SMALL_BATCH, NUM_SHARDS = 20_000, 250, 200
SECONDS = 120.0
CROP = "hand-written loop, libjpeg-turbo decodes only the crop"
# By files and peer: the target for the ratio of the loader's rate to the peer's rate.
TARGETS: dict[str, dict[str, float | None]] = {
    f"packed at {PACKED_SIDE}": {
        f"{CROP}, fastest settings": 0.93,
        f"{CROP}, default settings": None,
        "webdataset + simplejpeg": 1.0,
    },
    "originals": {
        f"{CROP}, fastest settings": 0.95,
        f"{CROP}, default settings": None,
        "webdataset + simplejpeg": 1.0,
    },
}


def rows(folder: Path | None) -> Iterator[Row]:
    """Compare random crops of JPEGs in `folder` (default: drawn ones), as they are and packed."""
    with TemporaryDirectory() as temporary:
        work = Path(temporary)
        files = [work / "images" / name for name in ("even", "odd")]  # two classes
        for each in files:
            each.mkdir(parents=True)
        if folder is None:
            _draw(files)
        else:
            found = [each for each in folder.rglob("*") if each.suffix.lower() in (".jpg", ".jpeg")]
            if not found:
                raise SystemExit(f"{folder} contains no JPEG files: pass a folder of .jpg files")
            for number, each in enumerate(sorted(found)):
                copy(each, files[number % 2] / f"{number}.jpg")
        for name, targets in TARGETS.items():
            source = ImageFolder(
                work / "images",
                short_side=PACKED_SIDE,
                original=name == "originals",
                test_fraction=0,
            )
            write_shards(source, work / name)
            with open_split(work / name, "train") as split:
                yield from _compared_crops(split, name, targets, work)


def _compared_crops(
    split: Split, name: str, targets: Mapping[str, float | None], work: Path
) -> Iterator[Row]:
    batch, tars = len(split), _tars(split)
    peers = {"webdataset + simplejpeg": images(data_peers.with_simplejpeg)}
    for kind, fast in (("fastest", True), ("default", False)):
        decode = data_peers.compiled_crop_and_skip(work, fast=fast)
        if decode is not None:
            peers[f"{CROP}, {kind} settings"] = images(decode)
    batches = {
        peer: (webdataset_loop if "webdataset" in peer else loop)(tars, "jpg", batch, collate)
        for peer, collate in peers.items()
    }
    config = DataConfig(shards=str(split.parts[0].folder), workers=0)
    kilobytes = split.sizes(np.arange(len(split))).mean() / 1e3
    case = f"{len(split)} images, {name}, {kilobytes:.0f} kB each"
    times = _timed(split, config, batch, batches, EPOCHS)
    for peer, at_least in targets.items():
        what = f"loader / {peer}, same files"
        if peer not in times:
            remedy = "requires a C compiler and libjpeg-turbo: apt-get install gcc libjpeg-dev"
            yield Row(what, case, details=remedy)
            continue
        yield _row(what, case, times, peer, at_least, EPOCHS * batch)


def small() -> Iterator[Row]:
    """Compare 32 x 32 PNGs in many shards, which are shifted and flipped as CIFAR's are."""
    with TemporaryDirectory() as temporary:
        work = Path(temporary)
        draw_small(work / "images", NUM_SMALL)
        source = ImageFolder(work / "images", test_fraction=0)
        write_shards(source, work / "shards", samples_per_shard=NUM_SMALL // NUM_SHARDS)
        config = DataConfig(
            shards=str(work / "shards"),
            image=ImageConfig(size=SMALL_SIDE),
            augment=AugmentConfig(crop_area=None, pad=PAD),
            workers=0,
        )
        with open_split(work / "shards", "train") as split:
            tars, collate = _tars(split), images(data_peers.shifted_png)
            batches = {
                "hand-written loop": loop(tars, "png", SMALL_BATCH, collate),
                "webdataset": webdataset_loop(tars, "png", SMALL_BATCH, collate),
            }
            number = NUM_SMALL // SMALL_BATCH
            times = _timed(split, config, SMALL_BATCH, batches, number)
    case = f"{NUM_SMALL:,} images, {SMALL_SIDE} x {SMALL_SIDE} PNG, {NUM_SHARDS} shards"
    for peer, at_least in (("hand-written loop", 0.95), ("webdataset", 1.5)):
        what = f"small images: loader / {peer} + OpenCV, same files"
        yield _row(what, case, times, peer, at_least, number * SMALL_BATCH)


def _row(
    what: str,
    case: str,
    times: Mapping[str, np.ndarray],
    peer: str,
    at_least: float | None,
    count: int,
) -> Row:
    return rate_row(
        what,
        case,
        times["loader"],
        times[peer],
        at_least=at_least,
        count=count,
        unit="images/CPU-s",
    )


def _timed(
    split: Split,
    config: DataConfig,
    batch: int,
    peers: Mapping[str, Iterator[object]],
    number: int,
) -> dict[str, np.ndarray]:
    """Return the CPU seconds that the loader and each peer take for `number` batches."""
    with TrainLoader(split, config, global_batch=batch, cursor=Cursor(0)) as loader:
        contenders: dict[str, Callable[[], object]] = {
            name: lambda batches=batches: [next(batches) for _ in range(number)][-1]
            for name, batches in {"loader": loader, **peers}.items()
        }
        return take_turns(
            contenders, title=str(split.parts[0].folder), seconds=SECONDS, clock=time.process_time
        )


def _tars(split: Split) -> list[str]:
    return split.addresses


def _draw(folders: Sequence[Path]) -> None:
    """Write 500 x 375 images of smooth noise whose file sizes match those of photographs."""
    rng = np.random.default_rng(0)
    for number in range(NUM_DRAWN):
        image = np.zeros((375, 500, 3))
        for side in (4, 16, 64, 250):
            noise = rng.normal(size=(side * 3 // 4, side, 3))
            image += 40 * cv2.resize(noise, (500, 375), interpolation=cv2.INTER_CUBIC)
        pixels = np.clip(image + 128, 0, 255).astype(np.uint8)
        path = folders[number % 2] / f"{number}.jpg"
        cv2.imwrite(str(path), pixels, [cv2.IMWRITE_JPEG_QUALITY, 90])


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
