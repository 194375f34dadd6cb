"""A photograph with every setting of `data.augment`, and with every operation of rand_augment.

The photograph is sample data from matplotlib (Grace Hopper, U.S. Navy, public domain). This module
draws the other image for mixup and cutmix.
"""

from collections.abc import Mapping

import numpy as np
from matplotlib import cbook
from matplotlib.figure import Figure, SubFigure
from PIL import Image, ImageDraw, ImageFont

from data.augment.base import Draws, pair_rng
from data.augment.mix import Mix
from data.augment.rand_augment import OPERATIONS
from data.augment.training import AugmentConfig, TrainingImages
from data.images.config import ImageConfig
from data.images.decode import for_evaluation
from data.images.fonts import font_folder
from docs.figures.look import bare, new_figure

_COLUMNS = 7
_IMAGE = ImageConfig(size=192)
_STILL = {"crop_area": None, "flip": 0}
_FILL = tuple(round(255 * mean) for mean in _IMAGE.mean)

# Title of a tile -> its settings, and the index of a sample whose random draw shows their effect.
_ALONE: dict[str, tuple[dict, int]] = {
    "crop_area": ({"flip": 0}, 3),
    "flip": ({**_STILL, "flip": 1}, 0),
    "brightness": ({**_STILL, "colour": {"brightness": 0.6}}, 1),
    "contrast": ({**_STILL, "colour": {"contrast": 0.8}}, 0),
    "saturation": ({**_STILL, "colour": {"saturation": 1.0}}, 0),
    "hue": ({**_STILL, "colour": {"hue": 0.5}}, 0),
    "grey": ({**_STILL, "grey": 1}, 0),
    "rand_augment": ({**_STILL, "rand_augment": {"operations": 2, "magnitude": 9}}, 1),
    "erase": ({**_STILL, "erase": 1}, 0),
}


def draw() -> Figure:
    figure = new_figure(6.1)
    settings, operations = figure.subfigures(2, 1)
    _tiles(settings, "data.augment, one setting at a time", _settings())
    photograph = np.ascontiguousarray(for_evaluation(_photograph(), _IMAGE).transpose(1, 2, 0))
    alone = {name: change(photograph, 0.9, _FILL) for name, change in OPERATIONS.items()}
    _tiles(operations, "operations of rand_augment at magnitude 9", alone)
    return figure


def _settings() -> dict[str, np.ndarray]:
    tiles = {"original": for_evaluation(_photograph(), _IMAGE)}
    for title, (settings, index) in _ALONE.items():
        images = TrainingImages(_IMAGE, AugmentConfig.model_validate(settings))
        rng = Draws().at(0, 0, index)
        tiles[title] = images.augmented(images.cropped(_photograph(), rng), rng)
    own, partner = tiles["original"], for_evaluation(_letter(), _IMAGE)
    tiles["another image"] = partner
    for kind in ("mixup", "cutmix"):
        draw = Mix.model_validate({f"{kind}_alpha": 1}).draw(_IMAGE.size, pair_rng(0, 0))
        tiles[f"{kind}: {draw.weight:.2f}"] = draw(own, partner)
    tiles["cutmix partner"] = draw(partner, own)
    return {title: pixels.transpose(1, 2, 0) for title, pixels in tiles.items()}


def _photograph() -> np.ndarray:
    path = cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    with Image.open(path) as opened:
        return np.asarray(opened.convert("RGB"))


def _letter() -> np.ndarray:
    """A white letter on a blue background, with the size of the photograph."""
    letter = Image.new("RGB", (512, 600), "#2680c2")
    font = ImageFont.truetype(str(font_folder() / "DejaVuSerif-Bold.ttf"), 420)
    ImageDraw.Draw(letter).text((256, 300), "ß", fill="white", font=font, anchor="mm")
    return np.asarray(letter)


def _tiles(part: SubFigure, title: str, tiles: Mapping[str, np.ndarray]) -> None:
    part.suptitle(title, x=0.01, ha="left", fontsize=11.5)
    for axes, (name, pixels) in zip(part.subplots(2, _COLUMNS).flat, tiles.items(), strict=True):
        axes.imshow(pixels)
        axes.set_title(name, fontsize=9.5, pad=3)
        bare(axes)
