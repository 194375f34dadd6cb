"""A picture as it goes into a shard: shrunk, byte for byte, or lossless from pixels.

Sources of pictures share it. Decoding and its limits are `data/images/decode.py`.
"""

import cv2
import numpy as np

from data.images.decode import decode, inspect, resize_short_side

_PNG = [cv2.IMWRITE_PNG_COMPRESSION, 6]


def check_packing(source: str, short_side: int | None, quality: int) -> None:
    """Raise ValueError, which begins with `source`, for a side or a JPEG quality out of range."""
    if short_side is not None and short_side < 1:
        raise ValueError(f"{source}: short side is {short_side}: give 1 or more")
    if not 1 <= quality <= 100:
        raise ValueError(f"{source}: quality is {quality}: choose 1 to 100")


def packed(
    data: bytes, *, short_side: int | None, quality: int, max_pixels: int
) -> tuple[bytes, str]:
    """(bytes, extension): JPEG of `short_side` pixels where that is smaller, else `data` itself.

    The extension is the format of the bytes, whatever the file was called. Raises ValueError for
    what `data.images` does not decode.
    """
    extension = inspect(data, max_pixels)
    picture = decode(data, 3, max_pixels)
    if short_side is None or min(picture.shape[:2]) <= short_side:
        return data, extension
    picture = cv2.cvtColor(resize_short_side(picture, short_side), cv2.COLOR_RGB2BGR)
    written, jpeg = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, quality])
    assert written
    return jpeg.tobytes(), "jpg"


def lossless(picture: np.ndarray) -> bytes:
    """PNG of pixels uint8, RGB [H, W, 3] or grey [H, W]."""
    if picture.ndim == 3:
        picture = cv2.cvtColor(picture, cv2.COLOR_RGB2BGR)
    written, png = cv2.imencode(".png", picture, _PNG)
    assert written
    return png.tobytes()
