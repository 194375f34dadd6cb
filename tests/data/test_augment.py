"""Augmentation of training samples: defaults, gray and color images, and reproducible draws."""

import re
from itertools import permutations
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml
from PIL import Image

from data.augment import color_jitter
from data.augment.base import Draws, Fill
from data.augment.color_jitter import ColorJitter
from data.augment.custom import CustomAugmentation
from data.augment.rand_augment import OPERATIONS, RandAugment
from data.augment.training import AugmentConfig, TrainingImages, resized
from data.config import DataConfig
from data.images.config import ImageConfig
from data.images.decode import for_evaluation

EVERYTHING = AugmentConfig(
    colour=ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
    grey=0.2,
    rand_augment=RandAugment(),
    erase=0.5,
)
STILL = {"crop_area": None, "flip": 0}
PAGE = Path(__file__).parents[2] / "docs/data.md"


def photo(channels: int, height: int = 40, width: int = 50) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    planes = [5 * y + 20, 4 * x + 30, 2 * (x + y) + 40]
    return np.stack(planes[:channels], axis=-1).astype(np.uint8)


def image(channels: int) -> ImageConfig:
    mean = (0.5, 0.2, 0.8)[:channels]
    return ImageConfig(size=32, channels=channels, mean=mean, std=(0.5,) * channels)


def samples(channels: int, augment: AugmentConfig, number: int = 60) -> list[np.ndarray]:
    given = photo(channels)
    before = given.copy()
    images = TrainingImages(image(channels), augment)
    made = []
    for i in range(number):
        rng = Draws().at(7, 1, i)
        made.append(images.augmented(images.cropped(given, rng), rng).copy())
    assert np.array_equal(given, before)
    return made


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ({"grey": 0.25}, 0.25),
        ({"erase": 0.25}, 0.25),
        ({"flip": 0.25}, 0.25),
        ({"colour": ColorJitter(brightness=0.4, probability=0.25)}, 0.25),
        ({"colour": ColorJitter(hue=0.5)}, 1.0),
    ],
)
def test_a_probability_is_the_fraction_of_changed_samples(part: dict, changed: float) -> None:
    plain = for_evaluation(photo(3), image(3))
    made = samples(3, AugmentConfig(**{**STILL, **part}), 800)
    share = np.mean([not np.array_equal(pixels, plain) for pixels in made])
    assert abs(share - changed) < 0.05


def test_saturation_and_hue_do_not_change_gray_images() -> None:
    augment = AugmentConfig(**STILL, grey=1, colour=ColorJitter(saturation=0.9, hue=0.5))
    plain = for_evaluation(photo(1), image(1))
    for pixels in samples(1, augment, 20):
        assert np.array_equal(pixels, plain)


def test_color_jitter_draws_from_its_range_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, float]] = []
    for name in ("brightness", "contrast", "saturation", "hue"):
        note = lambda p, amount, name=name: calls.append((name, amount)) or p  # noqa: E731
        monkeypatch.setattr(color_jitter, name, note)
    config = ColorJitter(brightness=0.2, contrast=1.5, saturation=0.6, hue=0.1)
    for i in range(600):
        config(photo(3), (), Draws().at(0, 0, i))
    orders = {tuple(name for name, _ in calls[i : i + 4]) for i in range(0, len(calls), 4)}
    assert orders == set(permutations(("brightness", "contrast", "saturation", "hue")))
    ranges = {"brightness": (0.8, 1.2), "contrast": (0, 2.5), "saturation": (0.4, 1.6)}
    for name, (low, high) in {**ranges, "hue": (-0.1, 0.1)}.items():
        drawn = [amount for called, amount in calls if called == name]
        margin = (high - low) / 50
        assert low <= min(drawn) < low + margin
        assert high - margin < max(drawn) <= high


def test_erasing_covers_one_box_with_the_mean() -> None:
    plain = for_evaluation(photo(3), image(3))
    mean = np.reshape([128, 51, 204], (3, 1, 1))
    shares = []
    for pixels in samples(3, AugmentConfig(**STILL, erase=1), 200):
        changed = (pixels != plain).any(0)
        rows, columns = changed.any(1).nonzero()[0], changed.any(0).nonzero()[0]
        box = np.s_[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert (pixels[box] == mean).all()
        shares.append(pixels[box].size / pixels.size)
    assert 0.01 < min(shares) < 0.04
    assert 0.28 < max(shares) < 0.36


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 128), (67, 33), (100, 100), (9, 200)])
def test_resized_crops_are_close_to_crops_by_pillow(height: int, width: int, channels: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, channels), dtype=np.uint8)
    given = cv2.resize(noise, (width, height)).reshape(height, width, channels)
    found = resized(given, 32)
    assert found.shape == (32, 32, channels)
    expected = Image.fromarray(given.squeeze()).resize((32, 32), Image.Resampling.BILINEAR)
    assert np.abs(found.squeeze().astype(int) - np.asarray(expected)).mean() < 4


@pytest.mark.parametrize(("channels", "number"), [(3, 14), (1, 13)])
def test_rand_augment_draws_operations_and_signs_uniformly(
    channels: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, float]] = []
    noting = tuple(
        lambda image, strength, fill, i=i: calls.append((i, strength)) or image
        for i in range(len(OPERATIONS))
    )
    monkeypatch.setattr("data.augment.rand_augment._ALL", noting)
    given = photo(channels)
    given = given[:, :, 0] if channels == 1 else given
    config = RandAugment(operations=3, magnitude=4)
    for i in range(2000):
        config(given, (0,), Draws().at(0, 0, i))
    assert len(calls) == 6000
    counts = np.bincount([i for i, _ in calls], minlength=number)
    assert len(counts) == number
    assert (np.abs(counts / 6000 * number - 1) < 0.2).all()
    strengths = np.array([strength for _, strength in calls])
    assert set(strengths) == {-0.4, 0.4}
    assert abs((strengths > 0).mean() - 0.5) < 0.03


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"colour": {}}, "set brightness, contrast, saturation or hue"),
        ({"mix": {}}, "set mixup_alpha or cutmix_alpha"),
        ({"pad": 4}, r"pad is 4 and crop_area is \[0.08, 1.0\]"),
    ],
)
def test_invalid_augmentations_raise(wrong: dict, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        AugmentConfig.model_validate(wrong)


@pytest.mark.parametrize("channels", [1, 3])
def test_pad_shifts_by_every_offset_up_to_its_value(channels: int) -> None:
    augment = AugmentConfig(**STILL, pad=2)
    still = samples(channels, AugmentConfig(**STILL), 1)[0]
    seen = set()
    for pixels in samples(channels, augment, 200):
        padded = np.full((channels, 36, 36), 0, np.uint8)
        padded[:] = np.round(np.array(image(channels).mean) * 255)[:, None, None]
        padded[:, 2:-2, 2:-2] = still
        matches = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if np.array_equal(padded[:, top : top + 32, left : left + 32], pixels)
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert len(seen) == 25


class Returning(CustomAugmentation):
    """An augmentation that returns the flipped image, or another array."""

    result: Any = None

    def __call__(self, image: np.ndarray, fill: Fill, rng: np.random.Generator) -> Any:
        return image[::-1] if self.result is None else self.result


@pytest.mark.parametrize("channels", [1, 3])
def test_custom_augmentations_run_last_and_do_not_change_other_draws(channels: int) -> None:
    own = EVERYTHING.model_copy(update={"custom": (Returning(kind="a:B"),)})
    for plain, turned in zip(samples(channels, EVERYTHING), samples(channels, own), strict=True):
        assert np.array_equal(plain[:, ::-1], turned)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (1, "a:B returned int: return a numpy array"),
        (np.zeros((32, 32, 1), np.uint8), r"returned uint8 \[32, 32, 1\] for an image of uint8"),
        (np.zeros((32, 32, 3)), r"returned float64 .* for an image of uint8 \[32, 32, 3\]"),
    ],
)
def test_a_custom_augmentation_that_changes_dtype_or_shape_raises(
    result: Any, message: str
) -> None:
    own = AugmentConfig(custom=(Returning(kind="a:B", result=result),))
    with pytest.raises(ValueError, match=message):
        samples(3, own, 1)


def test_the_recipes_of_the_page_on_data_load() -> None:
    recipes = re.findall(r"^```yaml\n(data:\n.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(recipes) >= 2
    for recipe in recipes:
        DataConfig.model_validate({"shards": "shards", **yaml.safe_load(recipe)["data"]})
