"""Reads the items of a collection and computes their features and thumbnails."""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
_MAX_BATCH = 1000  # items, most of which have known rows


class _PreparedItem(NamedTuple):
    item: Item
    prepared: Any
    thumbnail: bytes


def rows_of(
    model: Model,
    collection: Collection,
    known: Callable[[Item], Row | None],
    *,
    batch_size: int,
    threads: int | None,
    with_thumbnails: bool,
) -> Generator[Sequence[Row | Unreadable], None, None]:
    """Yield the rows of all items of a collection in order, in batches, and the items that cannot
    be read. Rows that are not `known` are computed, `batch_size` texts or image crops per forward
    pass.

    `threads` threads read and decode items slightly ahead of the model.
    """
    image = model.bundle.spec.image
    num_items = max(1, batch_size // (1 if image is None else image.crops))
    threads = threads or os.cpu_count() or 1
    prepare = partial(_prepare, model, collection, known, with_thumbnails)
    pool = ThreadPoolExecutor(threads, "decode")
    batch: list[Row | _PreparedItem | Unreadable] = []
    num_new = 0
    try:
        for one in in_order(pool, prepare, collection.items(), ahead=2 * batch_size + threads):
            batch.append(one)
            num_new += isinstance(one, _PreparedItem)
            if num_new == num_items or len(batch) == _MAX_BATCH:
                yield list(_computed(model, batch))
                batch, num_new = [], 0
        yield list(_computed(model, batch))
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare(
    model: Model,
    collection: Collection,
    known: Callable[[Item], Row | None],
    with_thumbnail: bool,
    item: Item | Unreadable,
) -> Row | _PreparedItem | Unreadable:
    if isinstance(item, Unreadable):
        return item
    row = known(item)
    if row is not None:
        return row
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


def _computed(
    model: Model, batch: Sequence[Row | _PreparedItem | Unreadable]
) -> Iterator[Row | Unreadable]:
    new = [one.prepared for one in batch if isinstance(one, _PreparedItem)]
    features = iter(model.features(new).numpy() if new else ())
    for one in batch:
        if not isinstance(one, _PreparedItem):
            yield one
        elif np.isfinite(row := next(features)).all():
            yield Row(one.item, row, one.thumbnail, is_new=True)
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
