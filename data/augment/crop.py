"""Random crops and shifts of training images."""

import cv2
import numpy as np
from pydantic import Field, model_validator

from data.augment.base import Box, Draws, Fill, random_box
from data.base_config import FrozenConfig
from data.images.config import ImageConfig
from data.images.decode import center_crop, checked_jpeg_header, decode
from data.images.jpeg_crop import decode_crop


class Crop(FrozenConfig):
    """A random resized crop (Szegedy et al. 2015) or a shifted center crop (He et al. 2016, section
    4.2).
    """

    crop_area: tuple[float, float] | None = Field(
        (0.08, 1.0),
        description="range of the area of a random crop, as fractions of the image; null selects a "
        "center crop",
    )
    crop_ratio: tuple[float, float] = Field(
        (3 / 4, 4 / 3), description="range of the aspect ratio (width / height) of a random crop"
    )
    pad: int = Field(
        0,
        ge=0,
        le=4096,
        description="maximum random shift in pixels in each direction; requires crop_area=null",
    )

    @model_validator(mode="after")
    def _ranges_are_possible(self) -> "Crop":
        low, high = self.crop_area or (1.0, 1.0)
        if not 0 < low <= high <= 1:
            raise ValueError(
                f"crop_area is [{low}, {high}]: set two fractions with 0 < low <= high <= 1"
            )
        low, high = self.crop_ratio
        if not 0 < low <= high:
            raise ValueError(f"crop_ratio is [{low}, {high}]: set two numbers with 0 < low <= high")
        if self.pad and self.crop_area is not None:
            raise ValueError(
                f"pad is {self.pad} and crop_area is {list(self.crop_area)}: set pad to 0 or "
                "crop_area to null"
            )
        return self

    def decoded(self, data: bytes, config: ImageConfig, fill: Fill, rng: Draws) -> np.ndarray:
        """Return the cropped image, uint8 [size, size, C], of a file's bytes.

        A random crop is drawn first, so that only its pixels are decoded if the image is a JPEG.
        Raises ValueError if the image is damaged or too large.
        """
        header = None if self.crop_area is None else checked_jpeg_header(data)
        if header is None or not header.upright:
            return self.cropped(decode(data, config.channels), config, fill, rng)
        box = self.box(header.height, header.width, rng)
        return resized(decode_crop(data, header, box, config.channels, config.size), config.size)

    def cropped(self, image: np.ndarray, config: ImageConfig, fill: Fill, rng: Draws) -> np.ndarray:
        """Return the cropped image: uint8 [H, W, C] -> uint8 [size, size, C]."""
        if self.crop_area is None:
            middle = center_crop(image, config)
            return _shifted(middle, self.pad, fill, rng) if self.pad else middle
        top, left, height, width = self.box(image.shape[0], image.shape[1], rng)
        return resized(image[top : top + height, left : left + width], config.size)

    def box(self, height: int, width: int, rng: Draws) -> Box:
        """Return a box with random area and shape.

        If none of ten draws fits, return the largest centered box with an allowed aspect ratio.
        """
        assert self.crop_area is not None
        drawn = random_box(height, width, self.crop_area, self.crop_ratio, rng)
        if drawn is not None:
            return drawn
        low, high = self.crop_ratio
        ratio = min(max(width / height, low), high)
        box_height = max(1, min(height, round(width / ratio)))
        box_width = max(1, min(width, round(height * ratio)))
        return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def resized(image: np.ndarray, size: int) -> np.ndarray:
    """Resize [H, W, C] to [size, size, C]. This is twice as fast as the area averaging used in
    evaluation.

    If a side is at least twice `size`, whole blocks of pixels are averaged first. The remaining
    resize uses bilinear interpolation. With Lanczos as the reference, the error is the same as for
    area averaging at scale factors up to 1.5, and within 2 dB of it at factors up to 2.
    """
    height, width = image.shape[:2]
    rows, columns = max(height // size, 1), max(width // size, 1)
    if rows > 1 or columns > 1:
        height, width = height // rows, width // columns
        whole = image[: height * rows, : width * columns]
        image = cv2.resize(whole, (width, height), interpolation=cv2.INTER_AREA)
    drawn = cv2.resize(image, (size, size), interpolation=cv2.INTER_LINEAR)
    return drawn.reshape(size, size, -1)


def _shifted(image: np.ndarray, pad: int, fill: Fill, rng: Draws) -> np.ndarray:
    """Return a random window of [H, W, C] after padding each side with `pad` pixels of `fill`."""
    height, width, channels = image.shape
    padded = cv2.copyMakeBorder(image, pad, pad, pad, pad, cv2.BORDER_CONSTANT, value=fill)
    top, left = rng.integers(2 * pad + 1), rng.integers(2 * pad + 1)
    return padded.reshape(*padded.shape[:2], channels)[top : top + height, left : left + width]
