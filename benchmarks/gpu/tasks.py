"""Recipes and batches of random inputs."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.loading.batch import Batch
from trainer.config import Recipe
from trainer.recipe import build_recipe


@dataclass(frozen=True)
class TaskSize:
    """The shapes of a training step: an encoder, its inputs and the classes.

    side: of square images, in pixels. tokens: per text.
    """

    encoder: dict[str, Any]
    classes: int
    batch: int
    side: int = 0
    tokens: int = 0


_NEVER = {"steps": 10**9}
# The optimizers of launch/recipes/imagenet-resnet50.yaml and launch/recipes/twitter-mbert.yaml.
IMAGES: dict[str, Any] = {
    "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
    "train": {"channels_last": True},
}
TEXTS: dict[str, Any] = {
    "backbone": {"pooling": "mean"},
    "optimizer": {"kind": "adamw", "lr": 5e-5, "weight_decay": 0.01},
}


def recipe_of(
    kind: dict[str, Any],
    size: TaskSize,
    changes: dict[str, Any],
    *,
    precision: str = "bf16",
    run: Path = Path("unused"),
) -> Recipe:
    """Return the recipe of IMAGES or TEXTS at a size, with the mappings in `changes` merged into
    it. The labels and inputs are random, so there are no shards."""
    data: dict[str, Any] = {"shards": "none"}
    if size.side:
        data["image"] = {"size": size.side}
    else:
        data["text"] = {"tokenizer": "none", "max_length": size.tokens}
    tree: dict[str, Any] = {
        "run": str(run),
        "data": data,
        "backbone": {"config": size.encoder},
        "train": {"global_batch": size.batch, "duration": _NEVER, "precision": precision},
        "checkpoint": {"every": _NEVER},
    }
    for change in (kind, changes):
        for section, values in change.items():
            tree[section] = {**tree.get(section, {}), **values}
    return build_recipe(tree, origin="benchmarks.gpu")


def random_batch(recipe: Recipe, num_classes: int, device: torch.device) -> Batch:
    """Return a batch of random inputs on `device`."""
    generator = torch.Generator().manual_seed(0)
    rows = recipe.train.global_batch
    draw = partial(torch.randint, generator=generator)
    if recipe.data.text is not None:
        assert recipe.backbone.config is not None
        tokens = draw(1, recipe.backbone.config["vocab_size"], (rows, recipe.data.text.max_length))
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    else:
        side = recipe.data.image.size
        inputs = {"pixel_values": draw(256, (rows, 3, side, side), dtype=torch.uint8)}
    return Batch(inputs, draw(num_classes, (rows,)), torch.arange(rows)).to(device)
