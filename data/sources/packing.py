"""Packs images for shards: creates keys, and resizes, copies or losslessly encodes the images.

All image sources use this module. `data/images/decode.py` decodes images and enforces the limits.
"""

import errno
import hashlib
from collections.abc import Callable, Iterable, Iterator

import cv2
import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from data.images.decode import MAX_PIXELS, decode, inspect, resize_short_side
from data.images.headers import is_jpeg_without_end
from data.shards.index import Label
from data.skipped import Skipped
from data.sources.source import STRICT, Sample

_PNG = [cv2.IMWRITE_PNG_COMPRESSION, 6]
_BAD_PATH = {
    errno.ENOENT: "the file does not exist",
    errno.ENAMETOOLONG: "the name of the file is too long",
}
# A tar header stores names of up to 100 bytes, and the extension needs some of them.
_MAX_KEY_BYTES = 90


@dataclass(frozen=True, config=STRICT)
class PackedImages:
    """A source that packs image files, and its packing options."""

    # For inherited fields, pydantic reads `kw_only` from each field, not from the decorator.
    short_side: int = Field(
        default=256,
        ge=1,
        kw_only=True,
        description="length of the short side, in pixels, to which larger images are resized",
    )
    quality: int = Field(
        default=90, ge=1, le=100, kw_only=True, description="JPEG quality of resized images"
    )
    original: bool = Field(default=False, kw_only=True, description="store image files unchanged")
    skip_bad: bool = Field(
        default=False,
        kw_only=True,
        description="skip bad samples and list them in skipped.jsonl",
    )

    @property
    def target_side(self) -> int | None:
        """`short_side`, or None if all image files are stored unchanged."""
        return None if self.original else self.short_side

    def image_sample(
        self,
        key: str,
        label: Label,
        read: Callable[[], bytes],
        *,
        name: str,
        where: object,
        fix: str,
    ) -> Sample | Skipped:
        """Pack the image file that `read` returns. A bad one is a `bad_sample`."""
        try:
            data, extension = packed(read(), short_side=self.target_side, quality=self.quality)
        except OSError as error:
            if (problem := _BAD_PATH.get(error.errno or 0)) is None:
                raise
            return self.bad_sample(name, problem, where=where, fix=fix)
        except ValueError as error:
            return self.bad_sample(name, str(error), where=where, fix=fix)
        return Sample(key, data, extension, label)

    def bad_sample(self, name: str, problem: str, *, where: object, fix: str) -> Skipped:
        """Return the bad sample `name` and its problem if `skip_bad` is set. Otherwise, raises
        ValueError with its location and the fix."""
        if self.skip_bad:
            return Skipped(name, problem)
        raise ValueError(f"{where}: {problem}: {fix}")


def packed(data: bytes, *, short_side: int | None, quality: int) -> tuple[bytes, str]:
    """Return a JPEG with the short side `short_side`, or smaller `data`, and the extension.

    The extension follows the format of the bytes, not the file name. Raises ValueError for data
    that `data.images` cannot decode, and for a JPEG without an end marker.
    """
    extension, _ = inspect(data, MAX_PIXELS)
    if is_jpeg_without_end(data):
        # OpenCV decodes a truncated image that is padded with zeros.
        raise ValueError("the image is truncated: the end marker of the JPEG is missing")
    image = decode(data, 3, MAX_PIXELS)
    if short_side is None or min(image.shape[:2]) <= short_side:
        return data, extension
    image = cv2.cvtColor(resize_short_side(image, short_side), cv2.COLOR_RGB2BGR)
    written, jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])
    assert written
    return jpeg.tobytes(), "jpg"


def lossless(image: np.ndarray) -> bytes:
    """Encode uint8 pixels, RGB [H, W, 3] or gray [H, W], as PNG."""
    if image.ndim == 3:
        image = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
    written, png = cv2.imencode(".png", image, _PNG)
    assert written
    return png.tobytes()


def webdataset_keys(paths: Iterable[str]) -> Iterator[str]:
    """Yield a key for each path: the path without its extension, made unique and short enough for a
    tar header.
    """
    seen: set[str] = set()
    for path in paths:
        folder, _, name = path.rpartition("/")
        stem = name.rpartition(".")[0].replace(".", "_") or "_"
        key = f"{folder}/{stem}" if folder else stem
        encoded = key.encode("utf-8", "surrogateescape")
        if len(encoded) > _MAX_KEY_BYTES or not key.isprintable():
            key = hashlib.sha256(encoded).hexdigest()[:32]
        if key in seen:
            suffix = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()
            key = f"{key}~{suffix[:8]}"
        seen.add(key)
        yield key
