"""Bytes of a picture -> uint8 pixels, with limits; and the crop that evaluation and serving use.

Training's random crops are `data/augment.py`. Normalising happens on the device.
"""

import io

import cv2
import numpy as np
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
)

from data.config import ImageConfig

# Loader processes are the parallelism here; OpenCV's own threads would fight them, and hang a fork.
cv2.setNumThreads(0)
# What cannot be decoded is an error of ours with the sample's name; OpenCV would print its own.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

MAX_PIXELS = 50_000_000

# The first bytes decide, never a file's name. Plugins are called by class: Image.open would warn
# about, or refuse, large pictures by a limit that is global to the process.
_FORMATS: dict[bytes, tuple[str, type[ImageFile.ImageFile]]] = {
    b"\xff\xd8\xff": ("jpg", JpegImagePlugin.JpegImageFile),
    b"\x89PNG\r\n\x1a\n": ("png", PngImagePlugin.PngImageFile),
    b"RIFF": ("webp", WebPImagePlugin.WebPImageFile),
    b"BM": ("bmp", BmpImagePlugin.BmpImageFile),
    b"GIF8": ("gif", GifImagePlugin.GifImageFile),
}


def inspect(data: bytes, max_pixels: int = MAX_PIXELS) -> str:
    """The format of a picture ("jpg", "png", "webp", "bmp", "gif"), from its header alone.

    Raises ValueError for anything else, for a damaged header and for more than `max_pixels`.
    """
    found = [entry for magic, entry in _FORMATS.items() if data.startswith(magic)]
    if not found:
        raise ValueError("not a picture: JPEG, PNG, WebP, BMP and GIF are read")
    extension, plugin = found[0]
    try:
        with plugin(io.BytesIO(data)) as header:
            width, height = header.size
    except (SyntaxError, OSError, ValueError) as error:
        raise ValueError(f"not a picture: its {extension} header is damaged ({error})") from error
    if width * height > max_pixels:
        raise ValueError(
            f"a picture of {width} x {height} pixels is over the limit of {max_pixels}: "
            "make it smaller"
        )
    return extension


def decode(data: bytes, channels: int, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Pixels uint8 [H, W, channels], RGB or grey, turned as the EXIF orientation says.

    Raises ValueError for what is no picture, is cut off, or has more than `max_pixels`.
    """
    extension = inspect(data, max_pixels)
    flag = cv2.IMREAD_GRAYSCALE if channels == 1 else cv2.IMREAD_COLOR
    picture = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
    if picture is None:
        raise ValueError(f"a picture that cannot be decoded: its {extension} data is damaged")
    if channels == 1:
        return picture[:, :, None]
    return cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)


def resize(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize [H, W, C]: area averaging where it shrinks, bilinear where it grows."""
    if picture.shape[:2] == (height, width):
        return picture
    shrinks = height <= picture.shape[0] and width <= picture.shape[1]
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    resized = cv2.resize(picture, (width, height), interpolation=method)
    return resized if resized.ndim == 3 else resized[:, :, None]


def resize_short_side(picture: np.ndarray, side: int) -> np.ndarray:
    """Resize [H, W, C] so that its shorter side has `side` pixels."""
    height, width = picture.shape[:2]
    if height <= width:
        return resize(picture, side, max(side, round(width * side / height)))
    return resize(picture, max(side, round(height * side / width)), side)


def for_evaluation(picture: np.ndarray, config: ImageConfig) -> np.ndarray:
    """uint8 [H, W, C] -> uint8 [C, size, size]: short side to `resize`, then the centre.

    Evaluation and serving both call this, so that a model sees the same pixels in both.
    """
    picture = resize_short_side(picture, config.resize or config.size)
    top = (picture.shape[0] - config.size) // 2
    left = (picture.shape[1] - config.size) // 2
    crop = picture[top : top + config.size, left : left + config.size]
    return np.ascontiguousarray(crop.transpose(2, 0, 1))
