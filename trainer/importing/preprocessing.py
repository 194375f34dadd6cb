"""Maps the image processor of a transformers or timm model to kway's evaluation transform.

The sizes, the filter and the normalization come from the settings of the processor. Processors
interpret these settings in different ways, so the result is compared with the output of the
processor (the one that uses Pillow and NumPy) for random images. A processor that does something
else is rejected.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import ValidationError
from transformers import AutoImageProcessor

from data.images.config import ImageConfig
from data.images.decode import for_evaluation
from data.messages import one_line

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
