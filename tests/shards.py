"""Small shard folders for tests, and recipes that train on them."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np

from data.shards.writing.writer import write_shards
from data.sources import Glyphs, ImageFolder, Table
from data.text.tokenizer_training import train_tokenizer
from tests.tiny_networks import TINY_BERT, TINY_RESNET
from trainer.config import Recipe
from trainer.recipe import build_recipe

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def write_images(folder: Path, *, per_class: int = 8, num_classes: int = 5) -> None:
    """Write class folders of small noise images, each with a bar whose position shows its class."""
    rng = np.random.default_rng(0)
    for label in range(num_classes):
        class_folder = folder / f"class {label}"
        class_folder.mkdir(parents=True)
        for number in range(per_class):
            image = rng.integers(0, 120, (16, 16, 3), dtype=np.uint8)
            image[:, 3 * label : 3 * label + 3] += 100
            assert cv2.imwrite(str(class_folder / f"{number}.png"), image)


def image_shards(folder: Path) -> Path:
    """Write the images of `write_images` to shards, with a test split, in `folder/shards`."""
    write_images(folder / "images")
    source = ImageFolder(folder / "images", original=True, test_fraction=0.25)
    write_shards(source, folder / "shards", workers=0)
    return folder / "shards"


def glyph_shards(folder: Path) -> Path:
    """Write shards of 13 characters of 16 x 16 pixels, with label vectors from their names."""
    write_shards(Glyphs(13, samples=1, size=16), folder / "shards", workers=0)
    return folder / "shards"


def text_shards(folder: Path) -> Path:
    """Write `shards` of 90 texts, and a `tokenizer` for them, to `folder`.

    A text has 1 to 40 words. About a third of them are the class name.
    """
    words = "the quick brown fox jumps over a lazy dog, while été naïve 東京 Москва sleep".split()  # noqa: SIM905
    rng = np.random.default_rng(0)
    rows = []
    for number in range(90):
        name = ("red", "green", "blue", "white")[number % 4]
        drawn = rng.choice([*words, *[name] * 8], size=int(rng.integers(0, 40))).tolist()
        rows.append(f'"{" ".join([name, *drawn])}",{name},{"test" if number % 5 == 0 else "train"}')
    table = folder / "table.csv"
    table.write_text("\n".join(["text,label,split", *rows]) + "\n", encoding="utf-8")
    source = Table((table,), folder / "work", text="text", label="label", split="split", workers=0)
    write_shards(source, folder / "shards", samples_per_shard=30, workers=0)
    source.clean_up()
    train_tokenizer(folder / "shards", folder / "tokenizer", vocab_size=120, threads=1)
    return folder


def text_recipe(texts: Path, run: Path, **changes: Any) -> Recipe:
    """Return a tiny recipe on `text_shards`; `changes` are keys with __ for dots."""
    tree: dict[str, Any] = {
        "run": str(run),
        "data": {
            "shards": str(texts / "shards"),
            "text": {"tokenizer": str(texts / "tokenizer"), "max_length": 24},
        },
        "backbone": {"config": {**TINY_BERT, **NO_DROPOUT, "vocab_size": 120}, "pooling": "mean"},
        "optimizer": {"kind": "adamw", "lr": 0.003},
        "train": {"duration": {"steps": 4}, "global_batch": 12},
    }
    return _changed(tree, changes)


def glyph_recipe(shards: Path, run: Path, **changes: Any) -> Recipe:
    """Return a tiny recipe on `glyph_shards`; `changes` are keys with __ for dots."""
    tree: dict[str, Any] = {
        "run": str(run),
        "data": {
            "shards": str(shards),
            "image": {"size": 16, "channels": 1, "mean": [0.5], "std": [0.25]},
            "augment": {"crop_area": [0.7, 1.0], "flip": 0},
        },
        "backbone": {"config": {**TINY_RESNET, "num_channels": 1}},
        "optimizer": {"kind": "sgd", "lr": 0.05},
        "train": {"duration": {"steps": 4}, "global_batch": 12},
    }
    return _changed(tree, changes)


def _changed(tree: dict[str, Any], changes: dict[str, Any]) -> Recipe:
    for key, value in changes.items():
        *path, last = key.split("__")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return build_recipe(tree, origin="test")
