"""Recipes and batches of random inputs, and the bare loops that the trainer is compared with."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel

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


def bare_loop(recipe: Recipe, batch: Batch, num_classes: int) -> Callable[[int], None]:
    """Return a function that takes steps of a plain PyTorch loop on one batch: the encoder of
    transformers, a linear layer and torch's cross-entropy under bf16 autocast, with torch's fused
    optimizer of the recipe. It neither clips gradients nor checks the loss."""
    device = batch.labels.device
    assert recipe.backbone.config is not None
    fields = dict(recipe.backbone.config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    is_text = recipe.data.text is not None
    options = {"add_pooling_layer": False} if is_text else {}
    encoder = AutoModel.from_config(config, **options).to(device).train()
    if recipe.train.channels_last:
        encoder.to(memory_format=torch.channels_last)
    width = config.hidden_size if is_text else config.hidden_sizes[-1]
    classifier = nn.Linear(width, num_classes, device=device)
    parameters = [*encoder.parameters(), *classifier.parameters()]
    optimizer = recipe.optimizer.build([{"params": parameters}])
    features = partial(_text_features if is_text else _image_features, encoder)

    def loop(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(classifier(features(batch.inputs)), batch.labels)
            loss.backward()
            optimizer.step()

    return loop


def _image_features(encoder: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    pixels = (inputs["pixel_values"] / 127.5 - 1).contiguous(memory_format=torch.channels_last)
    output: Any = encoder(pixel_values=pixels)
    return output.pooler_output.flatten(1)


def _text_features(encoder: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    output: Any = encoder(**inputs)
    mask = inputs["attention_mask"].unsqueeze(-1)
    return (output.last_hidden_state * mask).sum(1) / mask.sum(1)
