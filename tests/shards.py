"""Small shard folders that the tests make for themselves, and recipes that train on them."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np

from data.sources import Glyphs, ImageFolder
from data.writer import write_shards
from trainer.config import Recipe
from trainer.recipe import build_recipe

TINY_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}


def write_pictures(folder: Path, *, per_class: int = 8, num_classes: int = 5) -> None:
    """Class folders of small pictures: a bar whose place tells the class, and noise."""
    rng = np.random.default_rng(0)
    for label in range(num_classes):
        place = folder / f"class {label}"
        place.mkdir(parents=True)
        for number in range(per_class):
            picture = rng.integers(0, 120, (16, 16, 3), dtype=np.uint8)
            picture[:, 3 * label : 3 * label + 3] += 100
            assert cv2.imwrite(str(place / f"{number}.png"), picture)


def picture_shards(folder: Path) -> Path:
    """Shards of `write_pictures` with a test split, in `folder/shards`."""
    write_pictures(folder / "pictures")
    source = ImageFolder(folder / "pictures", short_side=None, test_fraction=0.25)
    write_shards(source, folder / "shards", workers=0)
    return folder / "shards"


def glyph_shards(folder: Path) -> Path:
    """Shards of 13 characters of 16 x 16 pixels, with label vectors from their names."""
    write_shards(Glyphs(13, samples=1, size=16), folder / "shards", workers=0)
    return folder / "shards"


def glyph_recipe(shards: Path, run: Path, **changes: Any) -> Recipe:
    """A tiny recipe on `glyph_shards`; `changes` are keys with __ for dots."""
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
    for key, value in changes.items():
        *path, last = key.split("__")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return build_recipe(tree, origin="test")
