"""Shear, shift and rotation of a picture within its frame, bilinear, as Pillow's transforms.

Pictures are uint8 [H, W, 3], or grey [H, W]. What comes in from outside is `fill`, one level a
channel.
"""

import math

import cv2
import numpy as np

from data.augment.change import Fill


def shear(picture: np.ndarray, x: float, y: float, fill: Fill) -> np.ndarray:
    """Rows pushed left by `x` times their distance from the top edge, columns up by `y` times."""
    return _affine(picture, [[1, x, 0], [y, 1, 0]], fill)


def translate(picture: np.ndarray, x: float, y: float, fill: Fill) -> np.ndarray:
    """Pushed left by `x` and up by `y`, shares of its width and height, to whole pixels."""
    height, width = picture.shape[:2]
    return _affine(picture, [[1, 0, round(x * width)], [0, 1, round(y * height)]], fill)


def rotate(picture: np.ndarray, degrees: float, fill: Fill) -> np.ndarray:
    """Turned counter-clockwise around its centre."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    y, x = (side / 2 for side in picture.shape[:2])
    return _affine(
        picture,
        [[cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y]],
        fill,
    )


def _affine(picture: np.ndarray, matrix: list[list[float]], fill: Fill) -> np.ndarray:
    """Each pixel of the result comes from `matrix` @ (x, y, 1), from the corner of the frame."""
    inverse = np.array(matrix, dtype=np.float64)
    # OpenCV counts from the middle of the first pixel instead.
    inverse[:, 2] += inverse[:, :2].sum(axis=1) / 2 - 0.5
    height, width = picture.shape[:2]
    return cv2.warpAffine(
        picture,
        inverse,
        (width, height),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=fill,
    )
