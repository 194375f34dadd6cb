"""kway's loader compared with webdataset, grain and a hand-written loop on images as in CIFAR.

All contenders read 32 x 32 PNG files from the same tar, shift them by up to 4 pixels, flip half of
them and produce uint8 batches. CPU seconds include all threads of the process.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import cv2
import numpy as np
from isal import isal_zlib

from benchmarks.data_image_peers import grain_batches, webdataset_batches
from benchmarks.data_tar_samples import TarSamples
from benchmarks.timing import Row, rate_row, share_row, take_turns
from data.augment.training import AugmentConfig
from data.config import DataConfig
from data.images.config import ImageConfig
from data.images.decode import MAX_PIXELS, check_size
from data.images.headers import png_header
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.sources import ImageFolder

SIDE, PAD, COUNT, BATCH, BATCHES = 32, 4, 2000, 250, 16
CASE = f"{COUNT:,} images, {SIDE} x {SIDE} PNG, shifted by up to {PAD} pixels"
TARGETS = {"hand-written loop": 0.95, "webdataset": 1.5, "grain": 1.5}


def rows() -> Iterator[Row]:
    """Compare the loader with each peer in one process."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _draw(folder / "images")
        write_shards(ImageFolder(folder / "images", test_fraction=0), folder / "shards")
        config = DataConfig(
            shards=str(folder / "shards"),
            image=ImageConfig(size=SIDE),
            augment=AugmentConfig(crop_area=None, pad=PAD),
            workers=0,
        )
        with (
            open_split(folder / "shards", "train") as split,
            TrainLoader(split, config, global_batch=BATCH, cursor=Cursor(0)) as loader,
        ):
            shards = split.manifest.of_split("train")
            tars = [split.folder.address(shard) for shard in shards]
            peers = {
                "hand-written loop": TarSamples(tars, _shifted, "png").batches(BATCH),
                "webdataset": webdataset_batches(tars, _shifted, BATCH, "png"),
                "grain": grain_batches(tars, _shifted, BATCH, "png"),
            }
            batches = {"loader": loader, **peers}
            contenders = {name: _taking(one) for name, one in batches.items()}
            files = [split.read(index)[0] for index in range(len(split))]
            contenders["checks"] = partial(_check, files)
            times = take_turns(
                contenders, title="small images", seconds=60, clock=time.process_time
            )
    for peer, at_least in TARGETS.items():
        yield rate_row(
            f"small images: loader / {peer} + OpenCV, same files",
            CASE,
            times["loader"],
            times[peer],
            at_least=at_least,
            count=BATCH * BATCHES,
            unit="images/CPU-s",
        )
    yield share_row(
        "small images: checks of the bytes and the header",
        CASE,
        times["checks"],
        times["loader"],
        count=BATCH * BATCHES,
        unit="image",
    )


def _check(files: Sequence[bytes]) -> None:
    """Perform the loader's checks that the peers lack, for samples that are in memory."""
    for data in itertools.islice(itertools.cycle(files), BATCH * BATCHES):
        isal_zlib.crc32(data)
        header = png_header(data)
        assert header is not None
        check_size(header.height, header.width, MAX_PIXELS)


def _draw(folder: Path) -> None:
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        image = cv2.resize(rng.normal(128, 60, (8, 8, 3)), (SIDE, SIDE))
        path = folder / str(number % 10) / f"{number}.png"
        cv2.imwrite(str(path), np.clip(image, 0, 255).astype(np.uint8))


def _shifted(data: bytes) -> np.ndarray:
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    padded = cv2.copyMakeBorder(image, PAD, PAD, PAD, PAD, cv2.BORDER_CONSTANT)
    top, left = random.randint(0, 2 * PAD), random.randint(0, 2 * PAD)
    image = padded[top : top + SIDE, left : left + SIDE]
    if random.random() < 0.5:
        image = cv2.flip(image, 1)
    return image.transpose(2, 0, 1)


def _taking(batches: Iterator[object]) -> Callable[[], None]:
    def take() -> None:
        for _ in range(BATCHES):
            next(batches)

    return take
