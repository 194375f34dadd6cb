"""Reads the items of a collection and computes their features and thumbnails."""

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import cv2
import numpy as np

from data.images.decode import MAX_PIXELS, decode, resize
from data.images.headers import jpeg_header
from data.processes import in_order
from serving.galleries.collection import Collection, Unreadable, reason
from serving.galleries.format import Item
from serving.galleries.gallery import Row
from serving.model import Model

THUMBNAIL_SIDE = 160  # maximum length in pixels of the longer side
_QUALITY = 80
# Decoding a JPEG at a fraction of its size is faster.
_REDUCTION_FLAGS = {
    8: cv2.IMREAD_REDUCED_COLOR_8,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    2: cv2.IMREAD_REDUCED_COLOR_2,
}
# Longer texts are truncated for display.
_MAX_SHOWN_CHARS = 500


class _PreparedItem(NamedTuple):
    item: Item
    prepared: Any
    thumbnail: bytes


def computed_rows(
    model: Model,
    collection: Collection,
    items: Iterable[Item],
    batch_size: int,
    threads: int | None,
    with_thumbnails: bool,
) -> Generator[Sequence[Row | Unreadable], None, None]:
    """Yield batches of the rows of the items in order, and of the items that cannot be read.

    `threads` threads read and decode items slightly ahead of the model.
    """
    image = model.bundle.spec.image
    num_items = max(1, batch_size // (1 if image is None else image.crops))
    threads = threads or os.cpu_count() or 1
    prepare = partial(_prepare, model, collection, with_thumbnails)
    pool = ThreadPoolExecutor(threads, "decode")
    try:
        prepared = in_order(pool, prepare, items, ahead=2 * batch_size + threads)
        while batch := list(islice(prepared, num_items)):
            yield list(_rows(model, batch))
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare(
    model: Model, collection: Collection, with_thumbnail: bool, item: Item
) -> _PreparedItem | Unreadable:
    jpeg = b""
    try:
        raw = collection.read(item)
        prepared = model.prepare(raw)
        if isinstance(raw, str):
            is_short = len(raw) <= _MAX_SHOWN_CHARS
            item = item._replace(text=raw if is_short else raw[: _MAX_SHOWN_CHARS - 1] + "…")
        elif with_thumbnail:
            jpeg = thumbnail(raw)
    except (OSError, ValueError) as error:
        return Unreadable(item.name, reason(error))
    return _PreparedItem(item, prepared, jpeg)


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
    header = jpeg_header(raw)
    fraction = max(header.height, header.width) // THUMBNAIL_SIDE if header is not None else 1
    flag = next((flag for factor, flag in _REDUCTION_FLAGS.items() if fraction >= factor), None)
    pixels = None if flag is None else cv2.imdecode(np.frombuffer(raw, np.uint8), flag)
    if pixels is None:
        pixels = np.ascontiguousarray(decode(raw, 3, MAX_PIXELS)[:, :, ::-1])
    scale = THUMBNAIL_SIDE / max(pixels.shape[:2])
    if scale < 1:
        height, width = (max(1, round(side * scale)) for side in pixels.shape[:2])
        pixels = resize(pixels, height, width)
    return cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1].tobytes()
