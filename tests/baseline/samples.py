"""Shard files, and the samples that training and evaluation read from them: their order, pixels and
token IDs.
"""

import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from data.config import DataConfig
from data.images.decode import decode
from data.loading.batch import Batch, Cursor
from data.loading.loader import EvalLoader
from data.shards.mixture import load_manifest
from data.shards.split import open_split
from tests.baseline.commands import must
from tests.baseline.values import Record, digest, exact, near, summary
from tests.data.rank_batches import rank_batches

_BATCH = 16
_PIXELS = 2e-3  # a few pixels that differ by one level
# Numbers of ranks and of steps. The last schedule changes the number of ranks twice.
_SCHEDULES = {
    "1 rank": [(1, 18)],
    "2 ranks": [(2, 18)],
    "3 ranks": [(3, 18)],
    "1, 3 and 2 ranks": [(1, 5), (3, 6), (2, 7)],
}
_IMAGE = {"size": 24, "resize": 28, "mean": [0.5] * 3, "std": [0.25] * 3}
_AUGMENT = {
    "colour": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    "grey": 0.2,
    "rand_augment": {"operations": 2, "magnitude": 9},
    "erase": 0.5,
    "mix": {"mixup_alpha": 0.4, "cutmix_alpha": 1.0, "probability": 0.8},
}
_WORDS = ("the", "quick", "brown", "fox", "lazy", "dog", "while", "été", "東京", "Москва", "🍕")


def record(folder: Path) -> Record:
    with chdir(folder):
        return {**_shards(), **_orders(), **_inputs()}


def write_images(folder: Path, counts: dict[str, int], seed: int) -> None:
    """Write PNG and JPEG images of several sizes, some of them gray, in class folders."""
    rng = np.random.default_rng(seed)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            height, width = rng.integers(30, 90, 2).tolist()
            channels = 1 if number % 5 == 4 else 3
            noise = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
            path = folder / name / f"{number}.{'png' if number % 2 else 'jpg'}"
            cv2.imwrite(str(path), cv2.blur(noise, (5, 5)))


def write_table(path: Path) -> None:
    """Write a CSV file of 120 texts in four classes and two splits."""
    rng = np.random.default_rng(0)
    lines = ["text,label,split"]
    for number in range(120):
        name = ("red", "green", "blue", "white")[number % 4]
        words = " ".join([name, *rng.choice(_WORDS, size=int(rng.integers(0, 30)))])
        lines.append(f'"{words}",{name},{"test" if number % 5 == 0 else "train"}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _shards() -> Record:
    """Record a digest of every file that `kway shard` and `kway tokenizer` write."""
    write_images(Path("images"), {"apple": 30, "birne": 17, "kiwi": 3}, seed=0)
    write_images(Path("more-images"), {"date": 9, "apple": 40}, seed=1)
    write_table(Path("table.csv"))
    must("shard", "glyphs", "-o", "glyphs", "--classes", 30, "--samples", 1, "--workers", 0)
    names = ("--languages", "en,fr,ja", "--test-languages", "fr", "--classes", 40)
    must("shard", "emoji-names", "-o", "emoji-names", *names, "--workers", 2)
    packed = ("--test-fraction", 0.2, "--samples-per-shard", 9, "--workers", 0)
    must("shard", "imagefolder", "images", "-o", "imagefolder", "--short-side", 40, *packed)
    for name in ("images", "more-images"):
        must("shard", "imagefolder", name, "-o", f"{name}-original", "--original", *packed)
    shutil.copytree("images-original", "damaged")
    with Path("damaged/train-000000.tar").open("r+b") as shard:
        shard.seek(700)  # in the first image
        shard.write(b"damaged")
    columns = ("--text", "text", "--label", "label", "--split", "split")
    must("shard", "table", "table.csv", "-o", "table", *columns, "--samples-per-shard", 20)
    must("tokenizer", "table", "-o", "tokenizer", "--vocab-size", 150)
    folders = ("emoji-names", "imagefolder", "images-original", "table", "tokenizer")
    files = {
        str(path): exact(digest(path))
        for folder in folders
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }
    return {**files, **_glyphs()}


def _glyphs() -> Record:
    """Record the classes and samples of `glyphs`. OpenCV draws them, so single pixels differ
    between processors."""
    manifest = load_manifest(DataConfig(shards=Path("glyphs")))
    found: Record = {
        "glyphs/classes": exact(list(manifest.class_names)),
        "glyphs/label vectors": exact(digest(Path("glyphs/label_vectors.safetensors"))),
    }
    for name in ("train", "test"):
        with open_split("glyphs", name) as split:
            samples = [split.read(index) for index in range(len(split))]
            keys = [split.key(index) for index in range(len(split))]
        found[f"glyphs/{name}"] = exact([keys, [label for _, _, label in samples]])
        pixels = np.stack([decode(content, channels=1) for content, _, _ in samples])
        found[f"glyphs/{name} pixels"] = near(summary(pixels), _PIXELS)
    return found


def _images(**changes: Any) -> DataConfig:
    settings = {"shards": "images-original", "image": _IMAGE, **changes}
    return DataConfig.model_validate(settings)


def _texts(**changes: Any) -> DataConfig:
    text = {"tokenizer": "tokenizer", "max_length": 20, **changes}
    return DataConfig.model_validate({"shards": "table", "text": text})


def _orders() -> Record:
    """Record the global batches of every kind of order on several numbers of ranks."""
    both = [{"shards": "images-original"}, {"shards": "more-images-original", "weight": 2}]
    orders = {
        "images": _images(),
        "shuffled shards": _images(shuffle_shards=2),
        "sampling": _images(sampling={"power": 0.5, "epoch_samples": 50}),
        "mixture": _images(mixture=both),
        "texts": _texts(batches_by_length=1),
        "texts by length": _texts(),
    }
    return {
        f"order/{name}/{schedule}": exact(_ledger(config, segments))
        for name, config in orders.items()
        for schedule, segments in _SCHEDULES.items()
    }


def _ledger(config: DataConfig, segments: list[tuple[int, int]]) -> dict[str, Any]:
    batches = [
        np.concatenate([b.indices.numpy() for b in ranks]) for ranks in _read(config, segments)
    ]
    indices = np.concatenate(batches)
    return {
        "first": indices[:8].tolist(),
        "times": np.bincount(np.bincount(indices)).tolist(),
        "digest": digest(indices.astype("<i8").tobytes()),
    }


def _read(config: DataConfig, segments: list[tuple[int, int]]) -> Iterator[list[Batch]]:
    """Yield the batches of all ranks at each step. A segment resumes where the last one stopped."""
    cursor = Cursor(seed=5)
    for world_size, steps in segments:
        yield from rank_batches(config, cursor, batch=_BATCH, steps=steps, world_size=world_size)
        cursor = Cursor(cursor.seed, cursor.samples + steps * _BATCH)


def _inputs() -> Record:
    """Record what the network gets: augmented pixels, token IDs and evaluation inputs."""
    training = {
        "plain images": _images(),
        "augmented images": _images(augment=_AUGMENT),
        "progressive sizes": _images(
            augment={"progressive": [{"until": {"steps": 2}, "size": 16}]}
        ),
        "a damaged image": _images(shards="damaged"),
        "texts": _texts(),
    }
    found: Record = {}
    for name, config in training.items():
        batches = list(_read(config, [(1, 4)]))
        if name == "augmented images":  # rotations and colors differ between processors
            found[f"training/{name}"] = near([_numbers(ranks) for ranks in batches], _PIXELS)
        else:
            found[f"training/{name}"] = exact([_content(ranks) for ranks in batches])
    evaluation = {
        "images": _images(),
        "ten crops": _images(image={**_IMAGE, "crops": 10}),
        "bicubic": _images(image={**_IMAGE, "interpolation": "bicubic"}),
        "texts": _texts(),
    }
    for name, config in evaluation.items():
        with open_split(config.shards, config.eval_split) as split:
            loader = EvalLoader(split, config, batch=8)
            found[f"evaluation/{name}"] = exact([_content([batch]) for batch in loader])
    return found


def _numbers(batches: list[Batch]) -> list[float]:
    """Return summaries of the tensors of the ranks' batches."""
    tensors = [tensor.numpy() for batch in batches for tensor in batch.tensors()]
    return [number for tensor in tensors for number in summary(tensor)]


def _content(batches: list[Batch]) -> str:
    """Return a digest of the tensors of the ranks' batches."""
    tensors = [tensor.numpy() for batch in batches for tensor in batch.tensors()]
    return digest(*(np.ascontiguousarray(tensor).tobytes() for tensor in tensors))
