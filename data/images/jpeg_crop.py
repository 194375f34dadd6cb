"""Decodes only the part of a JPEG that a random crop needs.

`_jpeg.c` does this with the libjpeg-turbo that Pillow uses. It is an optional extension: if kway
was installed without it, OpenCV decodes the whole image instead. The pixels are the same.
"""

import numpy as np
from PIL import Image, features

from data.images.decode import decode_jpeg
from data.images.headers import JpegHeader

try:
    from data.images import _jpeg

    _decodes_crops = _jpeg.connect(Image.core.__file__)
    _FAILURE = "Pillow does not use libjpeg-turbo"
except ImportError:
    _decodes_crops = False
    _FAILURE = "kway was installed without a C compiler or Python's headers"

_END_OF_IMAGE = b"\xff\xd9"
# The number of bytes that may follow the end of the image, such as padding.
_MAX_TRAILER = 1024
_DENOMINATORS = (8, 4, 2)


def decoder() -> str:
    """Return the name and version of the library that decodes random crops of JPEGs."""
    return f"libjpeg-turbo {features.version('libjpeg_turbo')}" if _decodes_crops else "OpenCV"


def whole_images_notice() -> str | None:
    """Return a line that states why whole JPEGs are decoded, or None if only crops are decoded."""
    if _decodes_crops:
        return None
    return (
        f"decoding whole JPEGs instead of random crops, because {_FAILURE}: loading takes more CPU "
        "time (docs/data.md, JPEG decoding)"
    )


def decode_crop(
    data: bytes, header: JpegHeader, box: tuple[int, int, int, int], channels: int, size: int
) -> np.ndarray:
    """Return the pixels of `box` (top, left, height, width) in an upright JPEG, [h, w, channels].

    If both sides of the box are at least 2, 4 or 8 times `size`, the result is scaled down by this
    factor. Raises ValueError if the image is damaged. With libjpeg-turbo, damage below the box is
    not detected unless the end-of-image marker is missing.
    """
    denominator = 1
    if min(box[2], box[3]) >= 2 * size:
        denominator = next(d for d in _DENOMINATORS if min(box[2], box[3]) >= d * size)
    # The edges of the box in the image that is scaled down, rounded to pixels.
    edges = box[0], box[1], box[0] + box[2], box[1] + box[3]
    top, left, bottom, right = ((edge + denominator // 2) // denominator for edge in edges)
    height, width = bottom - top, right - left
    has_end = data.find(_END_OF_IMAGE, -_MAX_TRAILER) >= 0
    if _decodes_crops and header.one_scan and has_end:
        rows = np.empty((height, width + _jpeg.EXTRA_COLUMNS, channels), np.uint8)
        shape = header.height, header.width
        column = _jpeg.decode(data, rows, *shape, top, left, height, width, denominator, channels)
        if column >= 0:
            return rows[:, column : column + width]
    image = decode_jpeg(data, header, channels, denominator)
    if image.shape[:2] != (-(-header.height // denominator), -(-header.width // denominator)):
        raise ValueError("the image cannot be decoded: its size differs from the one in its header")
    return image[top : top + height, left : left + width]
