"""Image files of random pixels."""

import cv2
import numpy as np


def image(seed: int, height: int = 20, width: int = 30, ending: str = ".png") -> bytes:
    """Return the content of a file with a different image for each seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return cv2.imencode(ending, pixels)[1].tobytes()
