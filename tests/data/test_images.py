"""Image decoding within limits, and image crops."""

import io

import cv2
import numpy as np
import pytest
from PIL import Image

from data.augment.base import Draws
from data.augment.training import AugmentConfig
from data.images.config import ImageConfig
from data.images.decode import decode, for_evaluation, resize_short_side
from tests.data.bad_images import encoded


def smooth(height: int, width: int) -> np.ndarray:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return cv2.GaussianBlur(noise, (0, 0), 4) // 2 + np.array([0, 60, 120], np.uint8)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF"])
def test_every_format_decodes_to_rgb_and_gray(kind: str) -> None:
    image = smooth(40, 60)
    data = encoded(Image.fromarray(image), kind)
    assert np.abs(decode(data, 3).astype(int) - image).mean() < 6
    gray = decode(data, 1)
    assert gray.shape == (40, 60, 1)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("L"))
    assert np.abs(gray[:, :, 0].astype(int) - expected).mean() < 3


def test_the_exif_orientation_is_applied() -> None:
    image = smooth(40, 60)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decode(encoded(Image.fromarray(image), "JPEG", exif=exif, quality=95), 3)
    assert turned.shape == (60, 40, 3)
    assert np.abs(turned.astype(int) - np.rot90(image, -1)).mean() < 6


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("PNG", "RGBA"), ("PNG", "LA"), ("PNG", "P"), ("WEBP", "RGBA"), ("GIF", "RGBA")],
)
def test_transparent_pixels_are_blended_with_white(kind: str, mode: str) -> None:
    drawing = Image.new("RGBA", (20, 30), (0, 0, 0, 0))
    drawing.paste((0, 0, 0, 255), (5, 5, 15, 25))
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    turned = {} if kind == "GIF" else {"exif": exif}
    lossless = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(drawing.convert(mode), kind, **lossless, **turned)
    expected = np.full((30, 20), 255, np.uint8)
    expected[5:25, 5:15] = 0
    if turned:
        expected = np.rot90(expected, -1)
    assert np.array_equal(decode(data, 1)[:, :, 0], expected)
    assert np.array_equal(decode(data, 3), np.dstack([expected] * 3))


@pytest.mark.parametrize(("height", "width"), [(50, 80), (80, 50), (7, 300), (24, 24), (1, 1)])
@pytest.mark.parametrize("channels", [1, 3])
def test_evaluation_crops_the_center_to_the_configured_size(
    height: int, width: int, channels: int
) -> None:
    image = smooth(height, width)[:, :, :channels]
    config = ImageConfig(
        size=24, resize=28, channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels
    )
    result = for_evaluation(image, config)
    assert result.shape == (channels, 24, 24)
    assert result.flags.c_contiguous
    big = resize_short_side(image, 28)
    assert min(big.shape[:2]) == 28
    top, left = (big.shape[0] - 24) // 2, (big.shape[1] - 24) // 2
    assert np.array_equal(result.transpose(1, 2, 0), big[top : top + 24, left : left + 24])


def test_training_crops_stay_inside_the_image_and_reach_its_edges() -> None:
    config = AugmentConfig(crop_area=(0.08, 1.0))
    rng = Draws().at(0, 0, 0)
    boxes = np.array([config.box(30, 50, rng) for _ in range(2000)])
    top, left, height, width = boxes.T
    assert (boxes >= 0).all()
    assert ((top + height <= 30) & (left + width <= 50)).all()
    assert (height >= 1).all()
    assert (width >= 1).all()
    assert top.min() == left.min() == 0
    assert (top + height).max() == 30
    assert (left + width).max() == 50
    ratio = width / height
    assert np.quantile(ratio, 0.02) > 0.6
    assert np.quantile(ratio, 0.98) < 1.6


def test_an_extreme_aspect_ratio_still_gets_a_crop() -> None:
    config = AugmentConfig(crop_area=(0.9, 1.0))
    assert config.box(4, 400, Draws().at(0, 0, 1)) == (0, 197, 4, 5)


def test_draws_depend_on_seed_epoch_and_sample() -> None:
    keys = [(seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in (0, 1, 2**40)]
    draws = {key: Draws().at(*key).random() for key in keys}
    assert len(set(draws.values())) == len(keys)
    assert draws[1, 1, 1] == Draws().at(1, 1, 1).random()


IMAGE = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)


def config(crops: int, channels: int = 3) -> ImageConfig:
    constants = (0.5,) * channels
    return ImageConfig(
        size=24, resize=31, crops=crops, channels=channels, mean=constants, std=constants
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_five_crops_are_the_corners_and_the_center(channels: int) -> None:
    image = IMAGE[:, :, :channels]
    big = resize_short_side(image, 31).transpose(2, 0, 1)
    crops = for_evaluation(image, config(5, channels))
    corners = [big[:, :24, :24], big[:, :24, -24:], big[:, -24:, :24], big[:, -24:, -24:]]
    centre = for_evaluation(image, config(1, channels))
    assert np.array_equal(crops, np.stack([*corners, centre]))


def test_ten_crops_are_five_crops_and_their_mirror_images() -> None:
    crops, five = (for_evaluation(IMAGE, config(number)) for number in (10, 5))
    assert crops.shape == (10, 3, 24, 24)
    assert crops.flags.c_contiguous
    assert np.array_equal(crops[:5], five)
    assert np.array_equal(crops[5:], five[..., ::-1])


def test_identical_crops_raise() -> None:
    for resize in (None, 24):
        with pytest.raises(ValueError, match="set resize above size 24"):
            ImageConfig(size=24, resize=resize, crops=5)


def test_the_offset_of_the_center_crop_is_rounded_down_or_to_the_nearest_integer():
    image = IMAGE[:31, :29]  # 7 and 5 pixels more than the crop
    offsets = {"down": (3, 2), "nearest": (4, 2)}  # 3.5 and 2.5; a half is rounded to even
    for rounding, (top, left) in offsets.items():
        chosen = config(1).model_copy(update={"resize": 29, "crop_offset": rounding})
        found = for_evaluation(image, chosen)
        assert np.array_equal(found, image[top : top + 24, left : left + 24].transpose(2, 0, 1))


@pytest.mark.parametrize("channels", [1, 3])
def test_pillows_filters_resize_the_short_side_or_both_sides(channels: int) -> None:
    image = IMAGE[:, :, :channels]
    opened = Image.fromarray(image if channels == 3 else image[:, :, 0])
    for keep_aspect, (width, height) in ((True, (43, 31)), (False, (31, 31))):
        changes = {"interpolation": "bicubic", "keep_aspect": keep_aspect}
        found = for_evaluation(image, config(1, channels).model_copy(update=changes))
        resized = np.asarray(opened.resize((width, height), Image.Resampling.BICUBIC))
        top, left = (height - 24) // 2, (width - 24) // 2
        expected = resized.reshape(height, width, channels)[top : top + 24, left : left + 24]
        assert np.array_equal(found, expected.transpose(2, 0, 1))
