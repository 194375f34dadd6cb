"""Thumbnails of image files."""

import cv2
import numpy as np

from data.images.decode import MAX_PIXELS, decode, resize
from data.images.headers import jpeg_header

THUMBNAIL_SIDE = 160  # maximum length in pixels of the longer side
_QUALITY = 80
# Decoding a JPEG at a fraction of its size is faster.
_REDUCTION_FLAGS = {
    8: cv2.IMREAD_REDUCED_COLOR_8,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    2: cv2.IMREAD_REDUCED_COLOR_2,
}


def thumbnail(raw: bytes) -> bytes:
    """Convert an image file to a JPEG whose longer side is at most `THUMBNAIL_SIDE` pixels.

    `raw` must be a file that `decode` accepts. Raises ValueError if it cannot be decoded.
    """
    pixels = _reduced_jpeg(raw)
    if pixels is None:
        pixels = np.ascontiguousarray(decode(raw, 3, MAX_PIXELS)[:, :, ::-1])
    scale = THUMBNAIL_SIDE / max(pixels.shape[:2])
    if scale < 1:
        height, width = (max(1, round(side * scale)) for side in pixels.shape[:2])
        pixels = resize(pixels, height, width)
    return cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1].tobytes()


def _reduced_jpeg(raw: bytes) -> np.ndarray | None:
    """Decode a JPEG at a reduced size if it is much larger than its thumbnail.

    Returns BGR pixels [H, W, 3], or None for any other file.
    """
    header = jpeg_header(raw)
    fraction = max(header.height, header.width) // THUMBNAIL_SIDE if header is not None else 1
    for factor, flag in _REDUCTION_FLAGS.items():
        if fraction >= factor:
            return cv2.imdecode(np.frombuffer(raw, np.uint8), flag)
    return None
