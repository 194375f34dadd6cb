"""Grey levels mapped by a table, as Pillow's ImageOps does: equal to it, level by level.

Pictures are uint8 [H, W, 3], or grey [H, W]; each channel has a table of its own.
"""

from collections.abc import Callable

import cv2
import numpy as np

_LEVELS = np.arange(256)


def autocontrast(picture: np.ndarray) -> np.ndarray:
    """Each channel stretched so that it reaches from 0 to 255."""
    return _by_channel(picture, _stretched)


def equalize(picture: np.ndarray) -> np.ndarray:
    """Each channel's levels spread so that all are about equally frequent."""
    return _by_channel(picture, _equalized)


def posterize(picture: np.ndarray, bits: int) -> np.ndarray:
    """Only the `bits` highest bits of each level, 1 to 8, are kept."""
    return picture & np.uint8(256 - 2 ** (8 - bits))


def solarize(picture: np.ndarray, threshold: float) -> np.ndarray:
    """Levels from `threshold` on are inverted; 256 inverts none."""
    table = np.where(threshold <= _LEVELS, 255 - _LEVELS, _LEVELS)
    return cv2.LUT(picture, table.astype(np.uint8))


def _by_channel(picture: np.ndarray, table: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    channels = cv2.split(picture)
    tables = np.stack([table(channel) for channel in channels], axis=-1)
    return cv2.LUT(picture, np.clip(tables, 0, 255).astype(np.uint8)[None])


def _stretched(channel: np.ndarray) -> np.ndarray:
    low, high, _, _ = cv2.minMaxLoc(channel)
    if high <= low:
        return _LEVELS
    scale = 255 / (high - low)
    return (_LEVELS * scale - low * scale).astype(np.int64)


def _equalized(channel: np.ndarray) -> np.ndarray:
    counts = cv2.calcHist([channel], [0], None, [256], [0, 256]).ravel().astype(np.int64)
    step = (channel.size - counts[counts.nonzero()[0][-1]]) // 255
    if not step:
        return _LEVELS
    return (step // 2 + np.cumsum(counts) - counts) // step
