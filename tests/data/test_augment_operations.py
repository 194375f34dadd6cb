"""Each pixel operation gives the same pixel values as Pillow."""

import colorsys
from collections.abc import Callable

import cv2
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from data.augment import image_operations
from data.augment.grayscale import Grayscale
from data.augment.rand_augment import OPERATIONS

FILL = {"RGB": (20, 240, 130), "L": (77,)}
COLOR = {"RGB": (20, 240, 130), "L": 77}  # the same for Pillow
AFFINE, BILINEAR = Image.Transform.AFFINE, Image.Resampling.BILINEAR


def image(mode: str, height: int = 61, width: int = 80) -> Image.Image:
    """Return an image with smooth color gradients, a bright rectangle and a few rows of noise."""
    rng = np.random.default_rng(3)
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    pixels = np.array(small.resize((width, height), BILINEAR))
    pixels[10:14] = rng.integers(0, 256, (4, width, 3))
    pixels[30:40, 20:50] = 250
    return Image.fromarray(pixels).convert(mode)


def differences(ours: np.ndarray, pillow: Image.Image) -> np.ndarray:
    expected = np.asarray(pillow)
    assert ours.dtype == np.uint8
    assert ours.shape == expected.shape
    return np.abs(ours.astype(int) - expected)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("factor", [0.0, 0.7, 1.0, 1.9])
@pytest.mark.parametrize("name", ["brightness", "contrast", "sharpness", "saturation"])
def test_operations_with_a_factor_match_pillow(name: str, factor: float, mode: str) -> None:
    if (name, mode) == ("saturation", "L"):
        return
    given = image(mode)
    enhancer = getattr(ImageEnhance, "Color" if name == "saturation" else name.title())
    ours = getattr(image_operations, name)(np.asarray(given), factor)
    assert differences(ours, enhancer(given).enhance(factor)).max() <= (factor != 1)


def test_grayscale_matches_pillow() -> None:
    given = image("RGB")
    grey = Grayscale(1)(np.asarray(given), (), np.random.default_rng(0))
    assert differences(grey, given.convert("L").convert("RGB")).max() <= 1


@pytest.mark.parametrize("turn", [-0.25, 0.375])
def test_hue_rotates_the_color_circle(turn: float) -> None:
    """Compare with exact arithmetic, because Pillow's color circle has 255 steps instead of 256."""
    given = np.asarray(image("RGB", 24, 24))
    turned = image_operations.hue(given, turn)
    for before, after in zip(given.reshape(-1, 3), turned.reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(before / 255))
        exact = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
        assert np.abs(after - 255 * np.array(exact)).max() < 10


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_level_mappings_match_pillow_exactly(mode: str) -> None:
    given = image(mode)
    faint = given.point(lambda level: level // 3 + 40)
    tiny = Image.fromarray(np.asarray(given)[10:13, 10:19])
    flat = Image.new(mode, (9, 9), "white")
    cases: list[tuple[Callable, Callable]] = [
        (image_operations.autocontrast, ImageOps.autocontrast),
        (image_operations.equalize, ImageOps.equalize),
        *((lambda p, b=b: image_operations.posterize(p, b), lambda p, b=b: ImageOps.posterize(p, b))
          for b in range(1, 9)),
        *((lambda p, t=t: image_operations.solarize(p, t), lambda p, t=t: ImageOps.solarize(p, t))
          for t in (0, 25.6, 128, 256)),
    ]  # fmt: skip
    for ours, pillow in cases:
        for case in (given, faint, tiny, flat):
            assert not differences(ours(np.asarray(case)), pillow(case)).any()


def affine(given: Image.Image, *matrix: float) -> Image.Image:
    """Return the image transformed by Pillow, with empty pixels filled."""
    return given.transform(given.size, AFFINE, matrix, BILINEAR, fillcolor=COLOR[given.mode])


MOVES = {
    "shear-x": (
        lambda p, fill, a: image_operations.shear(p, a, 0, fill),
        lambda p, a: affine(p, 1, a, 0, 0, 1, 0),
    ),
    "shear-y": (
        lambda p, fill, a: image_operations.shear(p, 0, a, fill),
        lambda p, a: affine(p, 1, 0, 0, a, 1, 0),
    ),
    "translate-x": (
        lambda p, fill, a: image_operations.translate(p, a, 0, fill),
        lambda p, a: affine(p, 1, 0, round(a * p.width), 0, 1, 0),
    ),
    "translate-y": (
        lambda p, fill, a: image_operations.translate(p, 0, a, fill),
        lambda p, a: affine(p, 1, 0, 0, 0, 1, round(a * p.height)),
    ),
    "rotate": (
        lambda p, fill, a: image_operations.rotate(p, 60 * a, fill),
        lambda p, a: p.rotate(60 * a, BILINEAR, fillcolor=COLOR[p.mode]),
    ),
}


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("amount", [-0.4, 0.0, 0.45])
@pytest.mark.parametrize("name", MOVES)
def test_affine_maps_match_pillow(name: str, amount: float, mode: str) -> None:
    """Exclude two pixels along the edges: OpenCV blends them with the fill, but Pillow does not."""
    ours, pillow = MOVES[name]
    given, fill = image(mode), FILL[mode]
    moved = ours(np.asarray(given), fill, amount)
    frame = np.full((given.height, given.width), 77, np.uint8)  # 77 is the fill of gray images
    frame[2:-2, 2:-2] = 255
    inside = np.asarray(pillow(Image.fromarray(frame), amount)) == 255
    assert inside.mean() > 0.25
    assert differences(moved, pillow(given, amount))[inside].max() <= 2
    frame[:] = 255
    empty = np.asarray(pillow(Image.fromarray(frame), amount)) == 77
    empty = cv2.erode(empty.astype(np.uint8), np.ones((5, 5), np.uint8)) > 0
    assert empty.any() or abs(amount) < 0.1
    assert (moved[empty] == COLOR[mode]).all()


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("strength", [-0.9, 0.0, 0.5])
def test_rand_augment_operations_use_the_ranges_of_the_papers(strength: float, mode: str) -> None:
    given, size = image(mode), abs(strength)
    moves = {"rotate": 0.5, "shear-x": 0.3, "shear-y": 0.3}  # rotation: fraction of 60 degrees
    moves |= {"translate-x": 150 / 331, "translate-y": 150 / 331}
    expected = {
        "identity": given,
        "autocontrast": ImageOps.autocontrast(given),
        "equalize": ImageOps.equalize(given),
        "solarize": ImageOps.solarize(given, 256 * (1 - size)),
        "posterize": ImageOps.posterize(given, 8 - round(4 * size)),
        "contrast": ImageEnhance.Contrast(given).enhance(1 + 0.9 * strength),
        "brightness": ImageEnhance.Brightness(given).enhance(1 + 0.9 * strength),
        "sharpness": ImageEnhance.Sharpness(given).enhance(1 + 0.9 * strength),
        **{name: MOVES[name][1](given, reach * strength) for name, reach in moves.items()},
    }
    if mode == "RGB":
        expected["colour"] = ImageEnhance.Color(given).enhance(1 + 0.9 * strength)
    assert OPERATIONS.keys() - {"colour"} == expected.keys() - {"colour"}
    assert len(OPERATIONS) == 14
    for name, pillow in expected.items():
        found = differences(OPERATIONS[name](np.asarray(given), strength, FILL[mode]), pillow)
        assert np.quantile(found, 0.9) <= 1, name
