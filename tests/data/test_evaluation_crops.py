"""Five or ten crops of an image for evaluation."""

import numpy as np
import pytest
from PIL import Image

from data.images.config import ImageConfig
from data.images.decode import crops_for_evaluation, for_evaluation, resize_short_side

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
    crops = crops_for_evaluation(image, config(5, channels))
    corners = [big[:, :24, :24], big[:, :24, -24:], big[:, -24:, :24], big[:, -24:, -24:]]
    centre = for_evaluation(image, config(1, channels))
    assert np.array_equal(crops, np.stack([*corners, centre]))


def test_ten_crops_are_five_crops_and_their_mirror_images() -> None:
    crops, five = (crops_for_evaluation(IMAGE, config(number)) for number in (10, 5))
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
