"""Decoding only the crop of a JPEG gives the same pixels and errors as decoding all of it."""

import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data.augment.base import Draws
from data.augment.training import AugmentConfig, TrainingImages, resized
from data.images import jpeg_crop
from data.images.config import ImageConfig
from data.images.decode import decode
from data.images.headers import jpeg_header
from data.images.jpeg_crop import decode_crop
from tests.data.bad_images import encoded

ROOT = Path(__file__).parents[2]
HEIGHT, WIDTH = 131, 173

needs_extension = pytest.mark.skipif(
    not jpeg_crop._decodes_crops, reason="data/images/_jpeg.c is not built"
)


def photo(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    smooth = cv2.GaussianBlur(noise, (0, 0), 2)
    return cv2.normalize(smooth, smooth, 0, 255, cv2.NORM_MINMAX)


def jpeg(mode: str = "RGB", **options: object) -> bytes:
    return encoded(Image.fromarray(photo()).convert(mode), "JPEG", **{"quality": 90, **options})


def with_factor(factor: int) -> bytes:
    options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factor]
    return cv2.imencode(".jpg", photo(), options)[1].tobytes()


KINDS = {
    "4:4:4": jpeg(subsampling=0),
    "4:2:2": jpeg(subsampling=1),
    "4:2:0": jpeg(subsampling=2),
    "4:4:0": with_factor(cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440),
    "4:1:1": with_factor(cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411),
    "restart markers": jpeg(restart_marker_rows=1),
    "gray": jpeg("L"),
    "progressive": jpeg(progressive=True),
    "CMYK": jpeg("CMYK"),
    "RGB": jpeg(keep_rgb=True),
    "padding after the end": jpeg() + bytes(500),
}


def crop(data: bytes, box: tuple[int, int, int, int], size: int, channels: int = 3) -> np.ndarray:
    header = jpeg_header(data)
    assert header is not None
    return decode_crop(data, header, box, channels, size)


def outcome(data: bytes, box: tuple[int, int, int, int]) -> bytes | None:
    """Return the pixels, or None for a damaged image."""
    try:
        return crop(data, box, HEIGHT).tobytes()
    except ValueError:
        return None


@st.composite
def boxes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    top, left = draw(st.integers(0, HEIGHT - 1)), draw(st.integers(0, WIDTH - 1))
    return top, left, draw(st.integers(1, HEIGHT - top)), draw(st.integers(1, WIDTH - left))


@pytest.mark.parametrize("kind", KINDS)
@given(box=boxes(), channels=st.sampled_from([1, 3]))
def test_a_decoded_crop_equals_the_crop_of_the_decoded_image(
    kind: str, box: tuple[int, int, int, int], channels: int
) -> None:
    top, left, height, width = box
    whole = decode(KINDS[kind], channels)
    expected = whole[top : top + height, left : left + width]
    assert np.array_equal(crop(KINDS[kind], box, HEIGHT, channels), expected)


@needs_extension
@pytest.mark.parametrize("kind", KINDS)
@given(box=boxes(), size=st.integers(5, 70), channels=st.sampled_from([1, 3]))
def test_both_decoders_give_the_same_pixels_at_every_scale(
    kind: str, box: tuple[int, int, int, int], size: int, channels: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = crop(KINDS[kind], box, size, channels)
        patch.setattr(jpeg_crop, "_decodes_crops", False)
        assert np.array_equal(found, crop(KINDS[kind], box, size, channels))


@needs_extension
@pytest.mark.parametrize("kind", ["4:2:0", "4:4:4", "gray", "restart markers"])
def test_only_the_crop_of_a_baseline_jpeg_is_decoded(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jpeg_crop, "decode_jpeg", None)
    assert crop(KINDS[kind], (20, 30, 40, 50), 224).shape == (40, 50, 3)


@pytest.mark.parametrize(("size", "scale"), [(61, 2), (30, 4), (15, 8)])
def test_large_crops_are_scaled_down_while_they_are_decoded(size: int, scale: int) -> None:
    smooth = cv2.GaussianBlur(photo(), (0, 0), 12)
    smooth = cv2.normalize(smooth, smooth, 0, 255, cv2.NORM_MINMAX)
    data, box = cv2.imencode(".jpg", smooth)[1].tobytes(), (3, 20, 125, 130)
    found = crop(data, box, size)
    assert abs(found.shape[0] - 125 / scale) < 1
    assert abs(found.shape[1] - 130 / scale) < 1
    whole = decode(data, 3)[3:128, 20:150]
    difference = resized(found, size).astype(int) - resized(whole, size)
    assert np.abs(difference).mean() < 10


@pytest.mark.parametrize("crop_area", [None, (0.08, 1.0)])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_exif_orientation_is_applied_before_the_crop(
    orientation: int, crop_area: tuple[float, float] | None
) -> None:
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "camera", orientation
    data = jpeg(exif=exif)
    header = jpeg_header(data)
    assert header is not None
    assert header.upright == (orientation == 1)
    images = TrainingImages(ImageConfig(size=64), AugmentConfig(crop_area=crop_area))
    for index in range(10):
        found = images.decoded(data, Draws().at(0, 0, index))
        expected = images.cropped(decode(data, 3), Draws().at(0, 0, index))
        assert np.array_equal(found, expected)


def test_exif_data_that_cannot_be_parsed_does_not_count_as_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 1
    data = jpeg(exif=exif)
    at = data.index(b"Exif\0\0") + 6
    for damage in (b"XX", data[at : at + 4] + b"\xff\xff\xff\xff"):
        header = jpeg_header(data[:at] + damage + data[at + len(damage) :])
        assert header is not None
        assert not header.upright


@needs_extension
def test_damage_inside_the_crop_has_the_same_result_with_both_decoders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, whole, rng = KINDS["4:2:0"], (0, 0, HEIGHT, WIDTH), np.random.default_rng(0)
    broken = [data[: len(data) * share // 10] for share in range(1, 10)] + [data[:-2]]
    for _ in range(200):
        flipped = bytearray(data)
        for offset in rng.integers(20, len(data), 3):
            flipped[offset] = rng.integers(256)
        broken.append(bytes(flipped))
    parsed = [one for one in broken if (header := jpeg_header(one)) and header[:2] == whole[2:]]
    with_extension = [outcome(one, whole) for one in parsed]
    monkeypatch.setattr(jpeg_crop, "_decodes_crops", False)
    assert with_extension == [outcome(one, whole) for one in parsed]
    assert None in with_extension


@pytest.mark.parametrize("extension", [pytest.param(True, marks=needs_extension), False])
def test_an_image_without_an_end_has_the_same_result_wherever_the_crop_is(
    extension: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jpeg_crop, "_decodes_crops", extension)
    data = KINDS["4:2:0"]
    assert outcome(data[: len(data) // 2], (0, 0, 20, 20)) is None
    assert outcome(data, (0, 0, 20, 20)) is not None


def test_the_limits_apply_before_the_crop_is_drawn() -> None:
    data = KINDS["4:2:0"]
    frame = data.index(b"\xff\xc0")
    bomb = data[: frame + 5] + b"\xea\x60\xea\x60" + data[frame + 9 :]
    with pytest.raises(ValueError, match="60000 x 60000 pixels, but the limit is"):
        TrainingImages(ImageConfig(), AugmentConfig()).decoded(bomb, Draws().at(0, 0, 0))


def test_without_the_extension_opencv_decodes_whole_images_and_a_line_states_it() -> None:
    code = (
        "import sys; sys.modules['data.images._jpeg'] = None\n"
        "from tests.data.test_jpeg_crop import KINDS, crop, jpeg_crop\n"
        "assert crop(KINDS['4:2:0'], (1, 2, 30, 40), 224).shape == (30, 40, 3)\n"
        "print(jpeg_crop.decoder(), jpeg_crop.whole_images_notice(), sep=': ')"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.check_output(command, cwd=ROOT, text=True, timeout=120)
    assert printed.startswith("OpenCV: decoding whole JPEGs")
    assert "without a C compiler" in printed
