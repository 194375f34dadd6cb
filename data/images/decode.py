"""Decodes images of limited size to uint8 pixels, and crops them for evaluation and serving.

The random crops for training are in `data/augment/`. Normalization happens on the device.
"""

import io
import struct
import warnings
import zlib
from functools import lru_cache

import cv2
import numpy as np
from PIL import Image, ImageFile, ImageOps

from data.images.config import ImageConfig
from data.images.headers import JpegHeader, has_more_scans, jpeg_header, png_header

# Loader processes provide the parallelism. OpenCV's threads would compete with them and can
# deadlock after fork.
cv2.setNumThreads(0)
# Decoding errors are raised here with the sample's name, so OpenCV must not log its own messages.
# libpng and libjpeg still print a line to stderr, which cannot be disabled here.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

# Some plugins warn if an image exceeds Pillow's own size limit. Turn this warning into an error,
# which is caught below.
warnings.simplefilter("error", Image.DecompressionBombWarning)

MAX_PIXELS = 50_000_000
# The short side is resized to a fixed length, so a thin strip could require gigabytes of memory.
MAX_ASPECT = 100
# The maximum number of scans of a JPEG. Each scan requires a pass over all pixels, so decoding a
# few kilobytes could take minutes.
MAX_SCANS = 100

# numpy copies images of up to this size in bytes faster than OpenCV does.
_SMALL = 3 * 48 * 48

# OpenCV's flags for images that are scaled down while they are decoded.
_REDUCED = {
    1: 0,
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8,
}

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")

_DAMAGE = (
    SyntaxError,
    OSError,
    ValueError,
    EOFError,
    IndexError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)


def inspect(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[str, bool]:
    """Return the format of an image ("jpg", "png", "webp", "bmp", "gif") from its header alone, and
    whether the image has transparency.

    Raises ValueError for another format, a damaged header and the errors of `check_size`.
    """
    with _opened(data) as header:
        (width, height), kind = header.size, header.format or ""
        transparent = header.mode in ("RGBA", "LA", "PA", "RGBa", "La") or (
            header.mode in ("1", "L", "P", "RGB") and "transparency" in header.info
        )
    check_size(height, width, max_pixels)
    # Several JPEGs in one file are an MPO.
    return "jpg" if kind in ("JPEG", "MPO") else kind.lower(), transparent


def _opened(data: bytes) -> ImageFile.ImageFile:
    """Open an image whose first bytes, not its name, determine the format."""
    try:
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except _DAMAGE as error:
        raise ValueError(
            "not an image, or its header is damaged: use JPEG, PNG, WebP, BMP or GIF"
        ) from error


# Many images have the same size.
@lru_cache(maxsize=256)
def check_size(height: int, width: int, max_pixels: int) -> None:
    """Raise ValueError for more than `max_pixels` pixels and for an aspect ratio above 100."""
    if width * height > max_pixels:
        raise ValueError(
            f"the image has {width} x {height} pixels, but the limit is {max_pixels}: make it "
            "smaller"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ValueError(
            f"the image has {width} x {height} pixels: the longer side may be at most "
            f"{MAX_ASPECT} times the shorter one"
        )


def decode(data: bytes, channels: int, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Return pixels uint8 [H, W, channels], RGB or gray, with the EXIF orientation applied.

    Transparent pixels are blended with white. Raises ValueError for data that is not an image or is
    truncated, for more than `max_pixels` pixels, and for an aspect ratio above 100.
    """
    if (png := png_header(data)) is not None:
        height, width, transparent = png
        check_size(height, width, max_pixels)
        extension = "png"
    elif (header := checked_jpeg_header(data, max_pixels)) is not None:
        return decode_jpeg(data, header, channels)
    else:
        extension, transparent = inspect(data, max_pixels)
    if transparent:
        image = _on_white(data)
        return image if channels == 3 else cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[:, :, None]
    if extension == "jpg":
        return decode_jpeg(data, None, channels)
    return _decoded(data, extension, channels)


def checked_jpeg_header(data: bytes, max_pixels: int = MAX_PIXELS) -> JpegHeader | None:
    """Return the header of a JPEG, or None for other data or if Pillow must parse the header.

    Raises ValueError for more than `max_pixels` pixels and for an aspect ratio above 100.
    """
    header = jpeg_header(data)
    if header is not None:
        check_size(header.height, header.width, max_pixels)
    return header


def decode_jpeg(
    data: bytes, header: JpegHeader | None, channels: int, denominator: int = 1
) -> np.ndarray:
    """Return the pixels of a JPEG whose size has been checked, scaled down by `denominator` (1, 2,
    4 or 8). Raises ValueError if it is damaged or has more than 100 scans.
    """
    # Counting the scans takes a tenth of the time of decoding, so skip it for a single scan.
    has_one = header is not None and header.one_scan
    if not has_one and has_more_scans(data, MAX_SCANS):
        raise ValueError(f"the image has more than {MAX_SCANS} JPEG scans: save it again")
    return _decoded(data, "jpg", channels, denominator)


def _decoded(data: bytes, extension: str, channels: int, denominator: int = 1) -> np.ndarray:
    flags = cv2.IMREAD_GRAYSCALE if channels == 1 else cv2.IMREAD_COLOR_RGB
    flags |= _REDUCED[denominator]
    decoded = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    if decoded is None:
        raise ValueError(f"the image cannot be decoded: its {extension} data is damaged")
    return decoded[:, :, None] if channels == 1 else decoded


def _on_white(data: bytes) -> np.ndarray:
    """Return the pixels of a transparent image, blended with white.

    This uses Pillow, because OpenCV either drops transparency or ignores the EXIF orientation.
    """
    try:
        with _opened(data) as opened:
            image = ImageOps.exif_transpose(opened.convert("RGBA"))
    except _DAMAGE as error:
        raise ValueError("the image cannot be decoded: its data is damaged") from error
    background = Image.new("RGBA", image.size, "white")
    return np.asarray(Image.alpha_composite(background, image).convert("RGB"))


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize [H, W, C], using area averaging to shrink or bilinear interpolation to enlarge."""
    if image.shape[:2] == (height, width):
        return image
    shrinks = height <= image.shape[0] and width <= image.shape[1]
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    resized = cv2.resize(image, (width, height), interpolation=method)
    return resized if resized.ndim == 3 else resized[:, :, None]


def resize_short_side(image: np.ndarray, side: int) -> np.ndarray:
    """Resize [H, W, C] so that its shorter side has `side` pixels."""
    height, width = image.shape[:2]
    if height <= width:
        return resize(image, side, max(side, round(width * side / height)))
    return resize(image, max(side, round(height * side / width)), side)


def resize_for_evaluation(image: np.ndarray, config: ImageConfig) -> np.ndarray:
    """Resize [H, W, C] to `config.resize`: the short side, or both sides if the aspect ratio is not
    kept.
    """
    side = config.resize or config.size
    if config.interpolation == "area" and config.keep_aspect:
        return resize_short_side(image, side)
    target = (side, side)
    if config.keep_aspect:
        # Round the long side down, like transformers and timm.
        height, width = image.shape[:2]
        target = (int(side * height / min(height, width)), int(side * width / min(height, width)))
    if config.interpolation == "area":
        return resize(image, *target)
    resized = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).resize(
        target[::-1], Image.Resampling[config.interpolation.upper()]
    )
    return np.asarray(resized).reshape(*target, image.shape[2])


def for_evaluation(image: np.ndarray, config: ImageConfig) -> np.ndarray:
    """Resize uint8 [H, W, C] to `resize`. Return its center crop, uint8 [C, size, size], or several
    crops, uint8 [crops, C, size, size].

    Five crops are the corners (top left, top right, bottom left, bottom right) and the center. Ten
    crops are these five and their mirror images (Krizhevsky et al. 2012). Evaluation and serving
    both call this, so that a model sees the same pixels in both.
    """
    if config.crops == 1:
        return contiguous(channels_first(center_crop(image, config)))
    image = resize_for_evaluation(image, config)
    bottom, right = (side - config.size for side in image.shape[:2])
    positions = [(0, 0), (0, right), (bottom, 0), (bottom, right), (bottom // 2, right // 2)]
    drawn, side = channels_first(image), config.size
    crops = np.stack([contiguous(drawn[:, y : y + side, x : x + side]) for y, x in positions])
    return crops if config.crops == 5 else np.concatenate([crops, crops[..., ::-1]])


def center_crop(image: np.ndarray, config: ImageConfig) -> np.ndarray:
    """Map [H, W, C] to [size, size, C]: resize to `resize`, then crop the center."""
    image = resize_for_evaluation(image, config)
    spare = [side - config.size for side in image.shape[:2]]
    top, left = (
        round(pixels / 2) if config.crop_offset == "nearest" else pixels // 2 for pixels in spare
    )
    return image[top : top + config.size, left : left + config.size]


def channels_first(image: np.ndarray) -> np.ndarray:
    """Return a view [C, H, W] of an image [H, W, C] or gray [H, W]."""
    return image[None] if image.ndim == 2 else image.transpose(2, 0, 1)


def contiguous(image: np.ndarray) -> np.ndarray:
    """Return a contiguous copy of an image [C, H, W]."""
    result = np.empty(image.shape, image.dtype)
    copy_planes(image, result)
    return result


def copy_planes(image: np.ndarray, result: np.ndarray) -> None:
    """Copy an image [C, H, W] to `result`, which is contiguous and of the same shape and type.

    For large views of [H, W, C], OpenCV is several times as fast as numpy.
    """
    if image.size <= _SMALL or image.ndim > 3 or image.strides[0] > 1 or len(image) == 1:
        result[:] = image
    else:
        # OpenCV writes to the given arrays only if their shape and type are right.
        cv2.split(image.transpose(1, 2, 0), list(result))
