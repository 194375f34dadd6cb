"""Operations on the pixels of an image, as defined by Pillow: colors, tone curves, affine maps.

Images are uint8 [H, W, 3], or gray [H, W]. A factor of 1 leaves the image unchanged. Results are
rounded, whereas Pillow truncates them. Affine maps use bilinear interpolation and set pixels
outside the image to `fill`, which contains one level per channel.
"""

import math
from collections.abc import Callable

import cv2
import numpy as np

from data.augment.base import Fill

_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, Pillow's mode L
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13  # Pillow's ImageFilter.SMOOTH
_LEVELS = np.arange(256)


def brightness(image: np.ndarray, factor: float) -> np.ndarray:
    """Scale the brightness. A factor of 0 gives black, and 2 doubles the brightness."""
    return cv2.addWeighted(image, factor, image, 0, 0)


def contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """Scale the contrast. A factor of 0 gives the mean gray of the image."""
    gray = image if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    mean = round(cv2.mean(gray)[0])
    return cv2.addWeighted(image, factor, image, 0, (1 - factor) * mean)


def saturation(image: np.ndarray, factor: float) -> np.ndarray:
    """Scale the saturation of an image [H, W, 3]. A factor of 0 gives gray."""
    return cv2.transform(image, factor * np.eye(3) + (1 - factor) * np.tile(_LUMA, (3, 1)))


def hue(image: np.ndarray, turn: float) -> np.ndarray:
    """Rotate the hue of [H, W, 3] by a fraction `turn` (-0.5 to 0.5) of the color circle."""
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
    hsv[:, :, 0] += np.uint8(
        round(turn * 256) % 256
    )  # the circle has 256 steps, so uint8 wraps correctly
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


def sharpness(image: np.ndarray, factor: float) -> np.ndarray:
    """Sharpen or smooth. A factor of 0 smooths, and 2 sharpens. The outermost pixels do not
    change.
    """
    kernel = (1 - factor) * _SMOOTH
    kernel[1, 1] += factor
    result = cv2.filter2D(image, -1, kernel)
    for edge in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
        result[edge] = image[edge]
    return result


def autocontrast(image: np.ndarray) -> np.ndarray:
    """Stretch each channel to the range 0 to 255."""
    return _by_channel(image, _contrast_curve)


def equalize(image: np.ndarray) -> np.ndarray:
    """Spread the levels of each channel so that all levels are about equally frequent."""
    return _by_channel(image, _equalizing_curve)


def posterize(image: np.ndarray, bits: int) -> np.ndarray:
    """Keep the `bits` (1 to 8) highest bits of each level."""
    return image & np.uint8(256 - 2 ** (8 - bits))


def solarize(image: np.ndarray, threshold: float) -> np.ndarray:
    """Invert all levels at or above `threshold`. A threshold of 256 leaves the image unchanged."""
    table = np.where(threshold <= _LEVELS, 255 - _LEVELS, _LEVELS)
    return cv2.LUT(image, table.astype(np.uint8))


def _by_channel(image: np.ndarray, table: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    channels = cv2.split(image)
    tables = np.stack([table(channel) for channel in channels], axis=-1)
    return cv2.LUT(image, np.clip(tables, 0, 255).astype(np.uint8)[None])


def _contrast_curve(channel: np.ndarray) -> np.ndarray:
    low, high, _, _ = cv2.minMaxLoc(channel)
    if high <= low:
        return _LEVELS
    scale = 255 / (high - low)
    return (_LEVELS * scale - low * scale).astype(np.int64)


def _equalizing_curve(channel: np.ndarray) -> np.ndarray:
    counts = cv2.calcHist([channel], [0], None, [256], [0, 256]).ravel().astype(np.int64)
    step = (channel.size - counts[counts.nonzero()[0][-1]]) // 255
    if not step:
        return _LEVELS
    return (step // 2 + np.cumsum(counts) - counts) // step


def shear(image: np.ndarray, x: float, y: float, fill: Fill) -> np.ndarray:
    """Shift each row left by `x` times its distance from the top edge, and each column up by `y`
    times its distance from the left edge.
    """
    return _affine(image, [[1, x, 0], [y, 1, 0]], fill)


def translate(image: np.ndarray, x: float, y: float, fill: Fill) -> np.ndarray:
    """Shift left by `x` of the width and up by `y` of the height, rounded to whole pixels."""
    height, width = image.shape[:2]
    return _affine(image, [[1, 0, round(x * width)], [0, 1, round(y * height)]], fill)


def rotate(image: np.ndarray, degrees: float, fill: Fill) -> np.ndarray:
    """Rotate counterclockwise around the center."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    y, x = (side / 2 for side in image.shape[:2])
    return _affine(
        image,
        [[cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y]],
        fill,
    )


def _affine(image: np.ndarray, matrix: list[list[float]], fill: Fill) -> np.ndarray:
    """Set each result pixel (x, y) to the value of `image` at `matrix` @ (x, y, 1). Coordinates are
    measured from the image corner.
    """
    inverse = np.array(matrix, dtype=np.float64)
    # OpenCV measures from the center of the first pixel instead.
    inverse[:, 2] += inverse[:, :2].sum(axis=1) / 2 - 0.5
    height, width = image.shape[:2]
    return cv2.warpAffine(
        image,
        inverse,
        (width, height),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=fill,
    )
