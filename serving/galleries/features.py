"""Reads the items of a collection and computes their features."""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import cv2
import numpy as np

from data.images.decode import MAX_PIXELS, decode, resize
from data.images.headers import jpeg_header
from data.processes import in_order
from serving.galleries.collection import Collection, Unreadable
from serving.galleries.format import Item
from serving.model import Model
from trainer.bundle.bundle import Bundle

THUMBNAIL_SIDE = 160  # maximum length in pixels of the longer side
_QUALITY = 80
# Decoding a JPEG at a fraction of its size is faster.
_REDUCTION_FLAGS = {
    8: cv2.IMREAD_REDUCED_COLOR_8,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    2: cv2.IMREAD_REDUCED_COLOR_2,
}


class Row(NamedTuple):
    """An item as it is stored in a gallery."""

    item: Item
    features: np.ndarray
    thumbnail: bytes


Batch = Sequence[Row | Unreadable]


@dataclass(frozen=True)
class FeatureOptions:
    """Options for computing features.

    - `batch_size`: number of texts or image crops per forward pass.
    - `threads`: number of threads that read and decode items. Default: one per core.
    - `thumbnails`: compute thumbnails of images.
    """

    batch_size: int = 32
    threads: int | None = None
    thumbnails: bool = True


class Encoder(Protocol):
    """Computes features of items with the model in `bundle`."""

    bundle: Bundle

    def batches(
        self, collection: Collection, items: Iterable[Item], options: FeatureOptions
    ) -> Generator[Batch, None, None]:
        """Yield the rows of the items in order, and the items that cannot be read."""
        ...


class LocalEncoder:
    """Computes features in this process."""

    def __init__(self, model: Model) -> None:
        self.bundle = model.bundle
        self._model = model

    def batches(
        self, collection: Collection, items: Iterable[Item], options: FeatureOptions
    ) -> Generator[Batch, None, None]:
        size = _batch_items(self.bundle, options)
        prepare = partial(_prepare, self._model, collection, with_thumbnail=options.thumbnails)
        with closing(_prepared(prepare, items, options)) as prepared:
            while batch := list(islice(prepared, size)):
                yield list(_rows(self._model, batch))


def _batch_items(bundle: Bundle, options: FeatureOptions) -> int:
    image = bundle.spec.image
    return max(1, options.batch_size // (1 if image is None else image.crops))


@dataclass(frozen=True)
class _PreparedItem:
    item: Item
    prepared: Any
    thumbnail: bytes


def _prepared(
    prepare: Callable[[Item], _PreparedItem | Unreadable],
    items: Iterable[Item],
    options: FeatureOptions,
) -> Generator[_PreparedItem | Unreadable, None, None]:
    """Yield prepared items in order. Threads read and decode them slightly ahead of the model."""
    threads = options.threads or os.cpu_count() or 1
    pool = ThreadPoolExecutor(threads, "decode")
    try:
        yield from in_order(pool, prepare, items, ahead=2 * options.batch_size + threads)
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare(
    model: Model, collection: Collection, item: Item, *, with_thumbnail: bool
) -> _PreparedItem | Unreadable:
    try:
        raw = collection.read(item)
        prepared = model.prepare(raw)
        jpeg = thumbnail(raw) if with_thumbnail and isinstance(raw, bytes) else b""
    except OSError as error:
        return Unreadable(item.name, error.strerror or str(error))
    except ValueError as error:
        return Unreadable(item.name, str(error))
    return _PreparedItem(collection.displayed(item, raw), prepared, jpeg)


def _rows(model: Model, batch: Sequence[_PreparedItem | Unreadable]) -> Iterator[Row | Unreadable]:
    yield from (one for one in batch if isinstance(one, Unreadable))
    ready = [one for one in batch if isinstance(one, _PreparedItem)]
    if not ready:
        return
    features = model.features([one.prepared for one in ready])
    finite = features.isfinite().all(1).tolist()
    for one, row, is_finite in zip(ready, features.numpy(), finite, strict=True):
        if is_finite:
            yield Row(one.item, row, one.thumbnail)
        else:
            yield Unreadable(one.item.name, "the features computed by the model are not finite")


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
