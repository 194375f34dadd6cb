"""Pictures through the loader against webdataset with Pillow, and against bare decoding.

Everything crops, resizes to 224 x 224 and flips at random, and ends in uint8 batches. CPU seconds
are those of all threads of the process, which loads by itself.
"""

import random
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import cv2
import numpy as np
import webdataset
from PIL import Image

from benchmarks.timing import Row, rate_row, take_turns
from data import Cursor, Split, TrainLoader, open_split
from data.augment import SampleDraws, for_training, random_box
from data.config import AugmentConfig, DataConfig, ImageConfig
from data.images.decode import decode
from data.sources import ImageFolder
from data.writing.writer import write_shards

IMAGE, AUGMENT = ImageConfig(), AugmentConfig()
BATCH = 71
PACKED_SIDE = 256
READS = 20_000

# What webdataset decodes is what this run wrote.
webdataset.utils.enforce_security = True


def rows(pictures: Path | None) -> Iterator[Row]:
    """The loader on pictures as they are and packed, reading alone, and one worker's rate."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        if pictures is None:
            pictures = folder / "pictures"
            draw(pictures)
        labels = folder / "labels.csv"
        files = sorted(path for path in pictures.rglob("*") if path.suffix.lower() in _SUFFIXES)
        if not files:
            raise SystemExit(f"{pictures} holds no {' or '.join(_SUFFIXES)}: name a folder of them")
        labels.write_text(
            "".join(f"{path.relative_to(pictures)},{path.stem}\n" for path in files),
            encoding="utf-8",
        )
        for name, side in (("original", None), ("packed", PACKED_SIDE)):
            source = ImageFolder(pictures, labels=labels, short_side=side, test_fraction=0)
            write_shards(source, folder / name)
        with open_split(folder / "original", "train") as originals:
            with open_split(folder / "packed", "train") as packed:
                yield from _against_webdataset(originals, packed)
                yield from _against_bare_decoding(packed)
            yield from _reading(originals)


_SUFFIXES = (".jpg", ".jpeg")


def draw(folder: Path, count: int = 142) -> None:
    """Pictures of 500 x 375 whose bytes are as many as those of photographs: smooth noise."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        picture = np.zeros((375, 500, 3))
        for side in (4, 16, 64, 250):
            noise = rng.normal(size=(side * 3 // 4, side, 3))
            picture += 40 * cv2.resize(noise, (500, 375), interpolation=cv2.INTER_CUBIC)
        pixels = np.clip(picture + 128, 0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / f"{number:03d}.jpg"), pixels, [cv2.IMWRITE_JPEG_QUALITY, 90])


def _against_webdataset(originals: Split, packed: Split) -> Iterator[Row]:
    count = _in_batches(len(originals), 4)
    contenders: dict[str, Callable[[], object]] = {
        "loader, packed": lambda: _load(packed, count),
        "loader, originals": lambda: _load(originals, count),
        "webdataset, originals": lambda: _webdataset_and_pillow(originals, count),
    }
    times = take_turns(contenders, title="pictures", seconds=90, clock=time.process_time)
    theirs = times["webdataset, originals"]
    for name, at_least in (("loader, packed", 3.0), ("loader, originals", 1.5)):
        yield rate_row(
            f"{name} / webdataset + Pillow, originals",
            f"{len(originals)} pictures, {_kilobytes(originals)}, packed {_kilobytes(packed)}",
            times[name],
            theirs,
            at_least=at_least,
            count=count,
            unit="pictures/CPU-s",
        )


def _load(split: Split, count: int, workers: int = 0) -> None:
    config = DataConfig(shards=str(split.folder), workers=workers)
    with TrainLoader(split, config, global_batch=BATCH, cursor=Cursor(0)) as loader:
        for _ in range(count // BATCH):
            next(loader)


def _webdataset_and_pillow(split: Split, count: int) -> None:
    rng = np.random.default_rng(0)

    def crop(picture: Image.Image) -> np.ndarray:
        picture = picture.convert("RGB")
        top, left, height, width = random_box(picture.height, picture.width, AUGMENT, rng)
        box = (left, top, left + width, top + height)
        side = (IMAGE.size, IMAGE.size)
        resized = picture.resize(side, Image.Resampling.BILINEAR, box=box)
        if rng.random() < AUGMENT.flip:
            resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(resized).transpose(2, 0, 1)

    dataset = (
        webdataset.WebDataset(_urls(split), shardshuffle=False)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(crop, int)
        .batched(BATCH, partial=False)
        .repeat()
    )
    for _ in islice(dataset, count // BATCH):
        pass


def _against_bare_decoding(split: Split) -> Iterator[Row]:
    """One worker against a loop that does nothing but decode, crop, resize and flip."""
    count = _in_batches(len(split), 12)
    data = [split.read(index)[0] for index in range(len(split))]

    draws = SampleDraws()

    def bare() -> None:
        for number in range(count):
            index = number % len(data)
            rng = draws.at(0, number // len(data), index)
            for_training(decode(data[index], 3), IMAGE, AUGMENT, rng)

    # The workers' start is part of neither: the loader hands out a batch before the clock runs.
    config = DataConfig(shards=str(split.folder), workers=1)
    with TrainLoader(split, config, global_batch=BATCH, cursor=Cursor(0)) as loader:
        next(loader)

        def load() -> None:
            for _ in range(count // BATCH):
                next(loader)

        times = take_turns({"loader": load, "bare": bare}, title="one worker", seconds=60)
    yield rate_row(
        "loader with one worker / bare decode + crop",
        f"packed at {PACKED_SIDE}",
        times["loader"],
        times["bare"],
        at_least=0.85,
        count=count,
        unit="pictures/s",
    )


def _reading(split: Split) -> Iterator[Row]:
    """Bytes alone: at random places through the index, and one after the other from the tar."""
    order = random.Random(0).choices(range(len(split)), k=READS)

    def by_index() -> None:
        for index in order:
            split.read(index)

    def in_sequence() -> None:
        dataset = webdataset.WebDataset(_urls(split), shardshuffle=False).repeat()
        for _ in islice(dataset, READS):
            pass

    times = take_turns({"index": by_index, "webdataset": in_sequence}, title="read", seconds=60)
    yield rate_row(
        "reading at random by index / webdataset in sequence",
        _kilobytes(split),
        times["index"],
        times["webdataset"],
        at_least=5,
        count=READS,
        unit="samples/s",
    )


def _urls(split: Split) -> list[str]:
    return [split.folder.address(shard) for shard in split.manifest.of_split(split.name)]


def _kilobytes(split: Split) -> str:
    sizes = split.sizes(np.arange(len(split)))
    return f"{sizes.mean() / 1e3:.0f} kB each"


def _in_batches(samples: int, epochs: int) -> int:
    return max(1, samples * epochs // BATCH) * BATCH
