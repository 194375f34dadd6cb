"""Colors and sharpness changed by a factor, as Pillow's ImageEnhance means it.

Pictures are uint8 [H, W, 3], or grey [H, W]. A factor of 1 changes nothing. Results are rounded,
where Pillow cuts decimals off.
"""

import cv2
import numpy as np

_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, Pillow's mode L
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13  # Pillow's ImageFilter.SMOOTH


def brightness(picture: np.ndarray, factor: float) -> np.ndarray:
    """0 is black, 2 is twice as bright."""
    return cv2.addWeighted(picture, factor, picture, 0, 0)


def contrast(picture: np.ndarray, factor: float) -> np.ndarray:
    """0 is the picture's mean grey all over."""
    mean = round(cv2.mean(_luma(picture))[0])
    return cv2.addWeighted(picture, factor, picture, 0, (1 - factor) * mean)


def saturation(picture: np.ndarray, factor: float) -> np.ndarray:
    """0 is grey. For [H, W, 3] alone."""
    return cv2.transform(picture, factor * np.eye(3) + (1 - factor) * np.tile(_LUMA, (3, 1)))


def hue(picture: np.ndarray, turn: float) -> np.ndarray:
    """Every colour moved by `turn` of the colour circle, -0.5 to 0.5. For [H, W, 3] alone."""
    hsv = cv2.cvtColor(picture, cv2.COLOR_RGB2HSV_FULL)
    hsv[:, :, 0] += np.uint8(round(turn * 256) % 256)  # the circle is 256 long: it wraps by itself
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


def sharpness(picture: np.ndarray, factor: float) -> np.ndarray:
    """0 is smoothed, 2 is sharpened; the outermost pixels stay."""
    kernel = (1 - factor) * _SMOOTH
    kernel[1, 1] += factor
    result = cv2.filter2D(picture, -1, kernel)
    for edge in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
        result[edge] = picture[edge]
    return result


def _luma(picture: np.ndarray) -> np.ndarray:
    return picture if picture.ndim == 2 else cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
