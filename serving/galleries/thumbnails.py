"""Small JPEGs of a gallery's pictures, for the page that shows hits."""

import cv2
import numpy as np

from data.images.decode import MAX_PIXELS, decode, resize
from data.images.headers import jpeg_size

SIDE = 160  # pixels of the longer side, at most
_QUALITY = 80
# A JPEG can be decoded at a fraction of its size, in a fraction of the time.
_REDUCED = {
    8: cv2.IMREAD_REDUCED_COLOR_8,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    2: cv2.IMREAD_REDUCED_COLOR_2,
}


def thumbnail(raw: bytes, max_pixels: int = MAX_PIXELS) -> bytes:
    """A picture file -> a JPEG whose longer side has `SIDE` pixels, or fewer where it had fewer.

    `raw` is one that `decode` has taken before. Raises ValueError for what cannot be decoded.
    """
    pixels = _small(raw)
    if pixels is None:
        pixels = np.ascontiguousarray(decode(raw, 3, max_pixels)[:, :, ::-1])
    scale = SIDE / max(pixels.shape[:2])
    if scale < 1:
        height, width = (max(1, round(side * scale)) for side in pixels.shape[:2])
        pixels = resize(pixels, height, width)
    return cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1].tobytes()


def _small(raw: bytes) -> np.ndarray | None:
    """Blue, green, red [H, W, 3] of a JPEG that is far larger than its thumbnail."""
    size = jpeg_size(raw)
    fraction = max(size) // SIDE if size is not None else 1
    for times, flag in _REDUCED.items():
        if fraction >= times:
            return cv2.imdecode(np.frombuffer(raw, np.uint8), flag)
    return None
