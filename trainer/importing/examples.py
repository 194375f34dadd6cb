"""Random images or texts, processed by the original library and by kway, for comparing logits."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from data.images.config import ImageConfig
from data.images.decode import for_evaluation
from data.loading.inputs import pad_tokens
from data.messages import one_line
from data.text.tokenizer import Tokenizer, open_tokenizer
from trainer.backbone.compatibility import positions_of
from trainer.bundle.spec import TextSpec
from trainer.importing.preprocessing import (
    image_config_of,
    open_processor,
    processed,
    random_image,
)

_NUM_IMAGES = 2
_NUM_RANDOM_TOKENS = (1, 5, 23)
# If neither the tokenizer nor the model states a maximum number of tokens.
_MAX_LENGTH = 512


@dataclass(frozen=True)
class Examples:
    """Example inputs and the preprocessing with which kway computed them.

    `original` are the inputs of the original model, one batch per example, computed by its own
    processor or tokenizer. `inputs` are those of kway's backbone: images in the same batches, and
    texts padded in one batch.
    """

    original: list[dict[str, Tensor]]
    inputs: list[dict[str, Tensor]]
    image: ImageConfig | None = None
    text: TextSpec | None = None
    tokenizer: Tokenizer | None = None


def image_examples(folder: Path, model: PreTrainedModel, source: str) -> Examples:
    """Return random images. Raises ValueError if kway cannot reproduce the preprocessing."""
    vision = getattr(model.config, "vision_config", model.config)
    timm = getattr(model.config, "pretrained_cfg", None) or {}
    channels = int(getattr(vision, "num_channels", timm.get("input_size", (3,))[0]))
    processor = open_processor(folder, source)
    image = image_config_of(processor, channels, source)
    images = [random_image(number, image.channels) for number in range(_NUM_IMAGES)]
    original = [torch.from_numpy(processed(processor, each)).float()[None] for each in images]
    # One image per batch, as in the original model: other batch sizes are rounded differently.
    own = [torch.from_numpy(for_evaluation(each, image))[None] for each in images]
    return Examples(
        [{"pixel_values": pixels} for pixels in original],
        [{"pixel_values": pixels} for pixels in own],
        image=image,
    )


def text_examples(
    folder: Path, model: PreTrainedModel, source: str, max_length: int | None
) -> Examples:
    """Return texts of random tokens, one of them longer than the model reads.

    Raises ValueError if the folder has no fast tokenizer, or if kway's tokens differ.
    """
    try:
        original = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
    except Exception as error:  # transformers raises arbitrary errors for damaged files
        raise ValueError(
            f"{source} has no tokenizer that can be opened ({one_line(error)}): save the model's "
            "tokenizer in the same folder with save_pretrained"
        ) from error
    length = _max_length(model, original, max_length)
    tokenizer = open_tokenizer(str(folder), max_length=length)
    rng, special = np.random.default_rng(0), set(original.all_special_ids)
    ids = [number for number in range(len(original)) if number not in special]
    lengths = (*_NUM_RANDOM_TOKENS, min(2 * length, 1024))
    texts = ["a", *(str(original.decode(rng.choice(ids, number))) for number in lengths)]
    accepted = inspect.signature(model.forward).parameters
    encoded = []
    for text in texts:
        found = original(text, truncation=True, max_length=length, return_tensors="pt")
        encoded.append({name: tensor for name, tensor in found.items() if name in accepted})
    tokens = tokenizer.encode(texts)
    if [each["input_ids"][0].tolist() for each in encoded] != tokens:
        raise ValueError(
            f"{source}: the tokens of its tokenizer {type(original).__name__} cannot be reproduced "
            "by its tokenizer.json: kway supports tokenizers that tokenizer.json fully describes"
        )
    padded = pad_tokens(tokens, tokenizer.pad_id, max_length=length)
    return Examples(encoded, [padded], text=TextSpec(max_length=length), tokenizer=tokenizer)


def _max_length(model: PreTrainedModel, tokenizer: Any, wanted: int | None) -> int:
    _, num_positions = positions_of(model)
    if wanted is None:
        stated = [int(tokenizer.model_max_length), num_positions]
        # transformers states 1e30 if the number is unknown.
        limits = [number for number in stated if number is not None and number < 10**9]
        return min(limits, default=_MAX_LENGTH)
    if num_positions is not None and wanted > num_positions:
        raise ValueError(
            f"--max-length is {wanted}, but the model has {num_positions} positions: lower it"
        )
    return wanted
