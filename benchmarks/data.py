"""Speed and memory of data loading, as ratios: `python -m benchmarks.data [SECTION ...]`.

images      crops of JPEGs: the loader / a hand-written loop and webdataset
small       32 x 32 PNGs in many shards, which are shifted and flipped as CIFAR's are
text        texts that are read, tokenized and padded: the loader / the tokenizer and webdataset
index       time and memory to open a split of 10,000,000 samples

Contenders take turns in each round. The table shows the median ratio over rounds next to its
target. CPU seconds include all threads of the process; there are no loader processes. Without
--images, JPEGs as large as ImageNet's are drawn, and without --texts, the texts are names of emoji,
which are shorter than tweets.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory

import cv2
import numpy as np

from benchmarks import data_index
from benchmarks.data_index import draw_small
from benchmarks.data_peers import (
    PAD,
    SMALL_SIDE,
    Encoder,
    compiled_crop_and_skip,
    images,
    loop,
    shifted_png,
    webdataset_loop,
    with_simplejpeg,
)
from benchmarks.timing import Row, command_line, rate_row, report, take_turns
from data.augment.training import AugmentConfig
from data.config import DataConfig, TextConfig
from data.images.config import ImageConfig
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.shards.split import Split, open_split
from data.shards.writing.writer import write_shards
from data.sources import EmojiNames, ImageFolder
from data.text.tokenizer_training import train_tokenizer

SECONDS = 120.0  # for each comparison
PACKED_SIDE, NUM_DRAWN, EPOCHS = 256, 142, 4
LOOP, WEBDATASET = "hand-written loop, libjpeg-turbo decodes only the crop", "webdataset"
TOKENIZER = "tokenizer alone, same texts in memory"
# The targets of the loader's rate relative to the loop's and webdataset's.
TARGETS = {f"packed at {PACKED_SIDE}": (0.93, 1.0), "originals": (0.95, 1.0)}
NUM_SMALL, SMALL_BATCH, NUM_SHARDS = 20_000, 250, 200
TEXT_BATCH, TEXT_STEPS, MAX_LENGTH, TEXT_CLASSES = 256, 40, 64, None

# By name: the batches of a peer, and the target for the loader's rate relative to the peer's.
Peers = dict[str, tuple[Iterator[object], float]]


def crops(folder: Path | None) -> Iterator[Row]:
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
        for name, (of_loop, of_webdataset) in TARGETS.items():
            original = name == "originals"
            source = ImageFolder(
                work / "images", short_side=PACKED_SIDE, original=original, test_fraction=0
            )
            write_shards(source, work / name)
            with open_split(work / name, "train") as split:
                batch, tars = len(split), split.addresses
                kilobytes = split.sizes(np.arange(batch)).mean() / 1e3
                case = f"{batch} images, {name}, {kilobytes:.0f} kB each"
                peer = webdataset_loop(tars, "jpg", batch, images(with_simplejpeg))
                peers: Peers = {f"{WEBDATASET} + simplejpeg": (peer, of_webdataset)}
                crop = compiled_crop_and_skip(work)
                if crop is not None:
                    peers[LOOP] = loop(tars, "jpg", batch, images(crop)), of_loop
                else:
                    remedy = (
                        "requires a C compiler and libjpeg-turbo: apt-get install gcc libjpeg-dev"
                    )
                    yield Row(f"loader / {LOOP}", case, details=remedy)
                config = DataConfig(shards=str(work / name), workers=0)
                yield from _compared_images(split, config, case, batch, EPOCHS, peers)


def small() -> Iterator[Row]:
    """Compare small images."""
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
        case = f"{NUM_SMALL:,} images, {SMALL_SIDE} x {SMALL_SIDE} PNG, {NUM_SHARDS} shards"
        with open_split(work / "shards", "train") as split:
            rest = split.addresses, "png", SMALL_BATCH, images(shifted_png)
            peers: Peers = {
                "hand-written loop + OpenCV": (loop(*rest), 0.95),
                f"{WEBDATASET} + OpenCV": (webdataset_loop(*rest), 1.5),
            }
            number = NUM_SMALL // SMALL_BATCH
            yield from _compared_images(split, config, case, SMALL_BATCH, number, peers)


def _compared_images(
    split: Split, config: DataConfig, case: str, batch: int, number: int, peers: Peers
) -> Iterator[Row]:
    """Compare how long the loader and its peers take for `number` batches."""
    with TrainLoader(split, config, global_batch=batch, cursor=Cursor(0)) as loader:
        contenders = {"loader": partial(_read, loader, number)}
        contenders |= {
            name: partial(_read, batches, number) for name, (batches, _) in peers.items()
        }
        targets = {name: target for name, (_, target) in peers.items()}
        yield from _compared(case, contenders, targets, number * batch, "images")


def texts(shards: Path | None) -> Iterator[Row]:
    """Compare how long it takes to read, tokenize and pad texts."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if shards is None:
            shards = folder / "texts"
            write_shards(EmojiNames(TEXT_CLASSES), shards)
        train_tokenizer(shards, folder / "tokenizer")
        encoder = Encoder(folder / "tokenizer", MAX_LENGTH)
        text = TextConfig(tokenizer=str(folder / "tokenizer"), max_length=MAX_LENGTH)
        config = DataConfig(shards=str(shards), text=text)
        with (
            open_split(shards, "train") as split,
            TrainLoader(split, config, global_batch=TEXT_BATCH, cursor=Cursor(0)) as loader,
        ):
            batches = [next(loader) for _ in range(TEXT_STEPS)]
            num_tokens = sum(int(batch.inputs["attention_mask"].sum()) for batch in batches)
            in_memory = [[split.text(i)[0] for i in batch.indices.tolist()] for batch in batches]
            peer = webdataset_loop(split.addresses, "txt", TEXT_BATCH, encoder.collate)

            def load() -> None:
                loader.close()
                loader.cursor = Cursor(0)  # the texts of `in_memory`
                _read(loader, TEXT_STEPS)

            contenders = {
                "loader": load,
                TOKENIZER: lambda: [encoder.ids(batch) for batch in in_memory],
                WEBDATASET: partial(_read, peer, TEXT_STEPS),
            }
            count = TEXT_BATCH * TEXT_STEPS
            case = f"batches of {TEXT_BATCH}, WordPiece, {num_tokens / count:.0f} tokens per text"
            targets = {TOKENIZER: 0.95, WEBDATASET: 1.0}
            yield from _compared(case, contenders, targets, count, "texts")


def _compared(
    case: str,
    contenders: Mapping[str, Callable[[], object]],
    targets: Mapping[str, float],
    count: int,
    unit: str,
) -> Iterator[Row]:
    """Compare the CPU time of the contender `loader` with that of each other one for `count`
    samples."""
    times = take_turns(contenders, title=case, seconds=SECONDS, clock=time.process_time)
    for name, at_least in targets.items():
        yield rate_row(
            f"{unit}: loader / {name}",
            case,
            times["loader"],
            times[name],
            at_least=at_least,
            count=count,
            unit=f"{unit}/CPU-s",
        )


def _read(batches: Iterator[object], number: int) -> None:
    for _ in range(number):
        next(batches)


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


if __name__ == "__main__":
    parser = command_line("data", __doc__)
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="JPEG files to read")
    parser.add_argument("--texts", type=Path, metavar="SHARDS", help="text shards to read")
    options = parser.parse_args()
    sections = {
        "images": partial(crops, options.images),
        "small": small,
        "text": partial(texts, options.texts),
        "index": data_index.rows,
    }
    report(options, sections)
