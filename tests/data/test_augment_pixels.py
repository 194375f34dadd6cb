"""Training pixels are bit-identical in every version of kway.

A run that is resumed with a newer version therefore trains on the same pixels as before.
"""

import hashlib

import cv2
import numpy as np
import pytest

from data.augment.base import Draws
from data.augment.training import AugmentConfig, for_training
from data.images.config import ImageConfig

# Other versions of OpenCV may round differently.
OPENCV = "5.0.0"
EVERYTHING = {
    "colour": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    "grey": 0.3,
    "rand_augment": {"operations": 2, "magnitude": 9},
    "erase": 0.5,
}


def digest(settings: dict, channels: int) -> str:
    """Return a digest of 40 samples of noise and of a smooth image."""
    image = ImageConfig(
        size=32,
        resize=40,
        channels=channels,
        mean=(0.5, 0.2, 0.8)[:channels],
        std=(0.5,) * channels,
    )
    augment = AugmentConfig.model_validate(settings)
    noise = np.random.default_rng(0).integers(0, 256, (70, 90, channels), dtype=np.uint8)
    smooth = cv2.blur(noise, (9, 9)).reshape(noise.shape)
    draws, found = Draws(), hashlib.sha256()
    for index in range(20):
        for given in (noise, smooth):
            pixels = for_training(given, image, augment, draws.at(3, 1, index))
            found.update(pixels.tobytes())
    return found.hexdigest()[:16]


@pytest.mark.skipif(cv2.__version__ != OPENCV, reason=f"the digests apply only to OpenCV {OPENCV}")
@pytest.mark.parametrize(
    ("settings", "grey", "colour"),
    [
        ({}, "87717875773d6948", "166e56c01b24a3ca"),
        ({"crop_area": None, "flip": 0}, "0d5ef2ad99df385a", "6bd6b7cb14238859"),
        ({"crop_area": None, "pad": 4}, "f9e052dae2364972", "8c267184b7edf876"),
        (
            {"crop_area": [0.5, 1], "crop_ratio": [1, 2], "flip": 1},
            "59eddf509a6484af",
            "90097d212a8eade9",
        ),
        (EVERYTHING, "fe9f09c16763d769", "16cc3a7e7cd2c74f"),
        ({"crop_area": None, "flip": 0, "erase": 1}, "14be3d53d3d0157a", "5a342e36a099ff20"),
        (
            {"colour": {"contrast": 0.8, "probability": 0.5}, "grey": 1},
            "ca5ef7d8d03c07d9",
            "5014c5932ee60fbb",
        ),
        (
            {"rand_augment": {"operations": 3, "magnitude": 10}},
            "c524f3070f8c5eb6",
            "555dff193fde692d",
        ),
    ],
)
def test_pixels_match_the_first_release(settings: dict, grey: str, colour: str) -> None:
    assert (digest(settings, 1), digest(settings, 3)) == (grey, colour)
