"""The inputs of an imported model: its preprocessing, and random images or texts, processed by the
original library and by kway, for comparing logits.

The image processor of a transformers or timm model is mapped to kway's evaluation transform. The
sizes, the filter and the normalization come from the settings of the processor. Processors
interpret these settings in different ways, so the result is compared with the output of the
processor (the one that uses Pillow and NumPy) for random images. A processor that does something
else is rejected.
"""

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedModel

from data.images.config import ImageConfig
from data.images.decode import for_evaluation
from data.loading.inputs import pad_tokens
from data.messages import one_line
from data.text.tokenizer import Tokenizer, open_tokenizer
from trainer.backbone.compatibility import positions_of
from trainer.bundle.spec import TextSpec

# Height and width of images that are enlarged, shrunk, or both, for the usual input sizes.
TEST_SIZES = ((61, 90), (640, 427), (300, 300), (1000, 150))
# The largest difference between two normalized pixels, in units of the normalization's range.
_TOLERANCE = 1e-4
_MAX_SIDE = 4096  # that of `ImageConfig`
_Pixels = np.ndarray[Any, np.dtype[Any]]


def open_processor(folder: Path, source: str) -> Any:
    """Return the image processor of the model in `folder`. `source` is its name in messages."""
    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ValueError(
            f"{source} has no image processor that can be opened ({one_line(error)}): save the "
            "model's image processor in the same folder with save_pretrained"
        ) from error


def image_config_of(processor: Any, channels: int, source: str) -> ImageConfig:
    """Return the evaluation transform that gives the same pixels as `processor`.

    Raises ValueError, with the reason, if there is none.
    """
    kind = type(processor).__name__
    sizes = [getattr(processor, name, None) for name in ("size", "crop_size")]
    if any(side > _MAX_SIDE for size in sizes if size for side in dict(size).values() if side):
        raise ValueError(f"{source}: its image processor {kind} has sides over {_MAX_SIDE} pixels")
    images = [random_image(number, channels) for number in range(len(TEST_SIZES))]
    try:
        expected = [processed(processor, image) for image in images]
        mean, std = _normalization(processor, channels)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ValueError(
            f"{source}: its image processor {kind} cannot be used ({one_line(error)}): kway "
            "supports processors that resize, crop and normalize"
        ) from error
    for geometry in _geometries(processor):
        try:
            config = ImageConfig(channels=channels, mean=mean, std=std, **geometry)
        except ValidationError:
            continue
        differences = [
            np.abs(_normalized(image, config) - other).max() / (float(np.ptp(other)) or 1.0)
            for image, other in zip(images, expected, strict=True)
            if other.shape == (channels, config.size, config.size)
        ]
        if len(differences) == len(images) and all(each <= _TOLERANCE for each in differences):
            return config
    raise ValueError(
        f"{source}: the pixels of its image processor {kind} cannot be reproduced: kway resizes "
        "with one of Pillow's filters, crops a square at the center and normalizes each channel"
    )


def random_image(number: int, channels: int) -> _Pixels:
    """Return a random image uint8 [H, W, C] of size `TEST_SIZES[number]`."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, (*TEST_SIZES[number], channels), dtype=np.uint8)


def processed(processor: Any, image: _Pixels) -> _Pixels:
    """Return the pixels [C, H, W] that an image processor computes."""
    opened = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    found: _Pixels = np.asarray(processor(opened, return_tensors="pt")["pixel_values"][0])
    return found


def _normalized(image: _Pixels, config: ImageConfig) -> _Pixels:
    """Return the normalized pixels [C, size, size] of kway's evaluation transform."""
    mean, std = (np.reshape(row, (-1, 1, 1)) for row in (config.mean, config.std))
    result: _Pixels = (for_evaluation(image, config) / 255 - mean) / std
    return result


def _normalization(processor: Any, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std of each channel, so that (x / 255 - mean) / std is the normalization.

    They are computed from a black and a white image, because processors may also use another
    scale, an offset or a second division. If they equal the settings, the settings are returned,
    because they are not rounded.
    """
    height, width = TEST_SIZES[2]
    black, white = (
        processed(processor, np.full((height, width, channels), value, np.uint8)).mean((1, 2))
        for value in (0, 255)
    )
    if black.shape != (channels,) or not (white > black).all():
        raise ValueError("white pixels must have larger values than black pixels")
    std = 1 / (white.astype(np.float64) - black)
    mean = -black * std
    settings = getattr(processor, "data_config", None) or {  # of timm
        name: getattr(processor, f"image_{name}", None) for name in ("mean", "std")
    }
    stated = [
        np.broadcast_to(np.float64(settings[name] or np.nan), channels) for name in ("mean", "std")
    ]
    if np.allclose(stated, [mean, std], rtol=1e-5, atol=1e-6):
        mean, std = stated
    return tuple(mean.tolist()), tuple(std.tolist())


def _geometries(processor: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of resizing and cropping that the processor may mean."""
    if hasattr(processor, "data_config"):
        settings = processor.data_config
        side = settings["input_size"][1]
        yield {
            "size": side,
            "resize": math.floor(side / settings["crop_pct"]),
            "interpolation": settings["interpolation"],
            "keep_aspect": settings["crop_mode"] != "squash",
            "crop_offset": "nearest",
        }
        return
    size, crop = getattr(processor, "size", None), getattr(processor, "crop_size", None)
    if not getattr(processor, "do_resize", False) or not size:
        return
    side = _side(size)
    final = _side(crop) if getattr(processor, "do_center_crop", False) and crop else side
    resample = getattr(processor, "resample", None)
    method = Image.Resampling.BILINEAR if resample is None else Image.Resampling(int(resample))
    crop_pct = getattr(processor, "crop_pct", None)
    resized = [side, int(256 / 224 * side)]  # LeViT resizes to 256 / 224 of the size
    if crop_pct:
        resized += [int(side / crop_pct), math.floor(side / crop_pct)]
    for resize in dict.fromkeys(resized):
        for keep_aspect in (True, False):
            yield {
                "size": final,
                "resize": resize,
                "interpolation": method.name.lower(),
                "keep_aspect": keep_aspect,
            }


def _side(size: Any) -> int:
    return int(size.get("shortest_edge") or size.get("height") or 0)


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
