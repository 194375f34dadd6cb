"""Build a gallery: list the collection, compute the features of new items, and write and publish
the gallery.

If the process is killed, only a few seconds of work are lost, and the previous gallery remains
intact.
"""

import hashlib
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from data.images.decode import MAX_PIXELS, decode, resize
from data.images.headers import jpeg_header
from data.processes import in_order
from serving.galleries.assembling import assemble, matched_items
from serving.galleries.collection import Collection, Unreadable, UnreadableFile
from serving.galleries.format import (
    UNREADABLE,
    GalleryInfo,
    Item,
    features_identity,
    item_line,
    order_of,
    read_info,
    read_items,
    shown_name,
)
from serving.galleries.rows import RowReader, RowWriter
from serving.galleries.work_folder import GallerySettings, WorkFolder, work_folder
from serving.model import Model

Report = Callable[[int, int], None]

_SECONDS_BETWEEN_COMMITS = 10.0
THUMBNAIL_SIDE = 160  # maximum length in pixels of the longer side
_QUALITY = 80
# Decoding a JPEG at a fraction of its size is faster.
_REDUCTION_FLAGS = {
    8: cv2.IMREAD_REDUCED_COLOR_8,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    2: cv2.IMREAD_REDUCED_COLOR_2,
}


@dataclass(frozen=True)
class IndexOptions:
    """Options for building a gallery.

    - `batch_size`: number of texts or image crops per forward pass.
    - `threads`: number of threads that read and decode items.
    - `strict`: raise an error if an item cannot be read.
    - `force`: update the gallery even if it was created from a different source.
    """

    batch_size: int = 32
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    thumbnails: bool = True
    strict: bool = False
    force: bool = False


@dataclass(frozen=True)
class IndexResult:
    """The result of a run.

    - `reused`: number of items whose features were computed by earlier runs.
    - `dropped`: number of items in the previous gallery that have been removed or changed.
    - `ignored`: number of files without an image extension.
    - `unreadable`: the first few unreadable items; `info` contains the total number.
    """

    info: GalleryInfo
    computed: int
    reused: int
    dropped: int
    ignored: int
    unreadable: Sequence[Unreadable]


@dataclass(frozen=True)
class _Listed:
    """Item counts. The features of `reused` items were computed by earlier runs, and `in_gallery`
    of these items are in the current gallery. The features of `missing` items must be computed."""

    reused: int
    in_gallery: int
    missing: int


@dataclass(frozen=True)
class _PreparedItem:
    item: Item
    prepared: Any
    thumbnail: bytes


def index_collection(
    model: Model,
    collection: Collection,
    path: Path,
    options: IndexOptions,
    *,
    computing: Report = lambda done, total: None,
    writing: Report = lambda done, total: None,
) -> IndexResult:
    """Create or update the gallery of `collection` at `path`.

    `computing` and `writing` are progress callbacks that receive (items done, total).

    Raises ValueError if the collection is empty, if `path` exists but is not a gallery of this
    collection, or, with `options.strict`, if an item cannot be read. Raises OSError if the disk is
    full. After an error, repeat the call to resume.
    """
    settings = _settings(model, collection, options)
    with work_folder(path, settings, force=options.force) as work, ExitStack() as opened:
        previous = read_info(path) if path.exists() else None
        rows = [_open(opened, folder, settings) for folder in work.indexed()]
        unreadable = opened.enter_context(UnreadableFile(work.unreadable))
        listed = _list(collection, work, rows, unreadable)
        with RowWriter(work.new_part(), dim=settings.dim) as part:
            prepare = partial(_prepare, model, collection, with_thumbnail=settings.thumbnails)
            with closing(_prepared(prepare, read_items(work.missing), options)) as prepared:
                _compute(model, prepared, listed.missing, part, unreadable, options, computing)
        unreadable.flush()
        _check(collection, listed.reused + part.count, unreadable, strict=options.strict)
        if previous is None or not _is_current(previous, listed, part.count, work, settings):
            rows.append(_open(opened, part.path, settings))
            info = assemble(
                work, settings, rows, listed.reused + part.count, unreadable.count, writing
            )
            work.publish()
        else:
            info = previous
    dropped = previous.num_items - listed.in_gallery if previous is not None else 0
    return IndexResult(
        info, part.count, listed.reused, dropped, collection.ignored, tuple(unreadable.first)
    )


def _settings(model: Model, collection: Collection, options: IndexOptions) -> GallerySettings:
    return GallerySettings(
        reads=model.reads,
        backbone=features_identity(model.bundle),
        dim=model.bundle.spec.dim,
        thumbnails=options.thumbnails and model.reads == "images",
        source=shown_name(str(collection.path.resolve())),
    )


def _open(opened: ExitStack, folder: Path, settings: GallerySettings) -> RowReader:
    return opened.enter_context(closing(RowReader(folder, dim=settings.dim)))


def _list(
    collection: Collection, work: WorkFolder, rows: Sequence[RowReader], unreadable: UnreadableFile
) -> _Listed:
    """Write a listing of all items and a listing of the items that must be computed."""
    reused = in_gallery = missing = 0

    def items() -> Iterator[Item]:
        for one in collection.items():
            if isinstance(one, Unreadable):
                unreadable.add(one)
            else:
                yield one

    with work.listing.open("wb") as listing, work.missing.open("wb") as new:
        for item, indexed in matched_items(items(), rows, order_of(collection.reads)):
            listing.write(item_line(item))
            if indexed is None:
                new.write(item_line(item))
                missing += 1
            else:
                reused += 1
                in_gallery += indexed.rows.path == work.gallery
    return _Listed(reused, in_gallery, missing)


def _prepared(
    prepare: Callable[[Item], _PreparedItem | Unreadable],
    items: Iterator[Item],
    options: IndexOptions,
) -> Generator[_PreparedItem | Unreadable, None, None]:
    """Yield prepared items in order. Threads read and decode them slightly ahead of the model."""
    pool = ThreadPoolExecutor(options.threads, "decode")
    try:
        yield from in_order(pool, prepare, items, ahead=2 * options.batch_size + options.threads)
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


def _compute(
    model: Model,
    prepared: Iterator[_PreparedItem | Unreadable],
    missing: int,
    part: RowWriter,
    unreadable: UnreadableFile,
    options: IndexOptions,
    report: Report,
) -> None:
    """Compute the features of the prepared items and append them to `part` in order."""
    size = max(1, options.batch_size // model.crops)
    done, committed = 0, time.monotonic()
    while batch := list(islice(prepared, size)):
        for one in batch:
            if isinstance(one, Unreadable):
                unreadable.add(one)
        _append(model, [one for one in batch if isinstance(one, _PreparedItem)], part, unreadable)
        done += len(batch)
        if time.monotonic() - committed >= _SECONDS_BETWEEN_COMMITS:
            part.commit()
            committed = time.monotonic()
        report(done, missing)


def _append(
    model: Model, ready: Sequence[_PreparedItem], part: RowWriter, unreadable: UnreadableFile
) -> None:
    if not ready:
        return
    features = model.features([one.prepared for one in ready])
    finite = features.isfinite().all(1).tolist()
    for one, row, is_finite in zip(ready, features.numpy(), finite, strict=True):
        if is_finite:
            part.append(one.item, row, one.thumbnail)
        else:
            unreadable.add(
                Unreadable(one.item.name, "the features computed by the model are not finite")
            )


def _check(
    collection: Collection, readable: int, unreadable: UnreadableFile, *, strict: bool
) -> None:
    if unreadable.count and (strict or not readable):
        name, reason = unreadable.first[0]
        more = f" and {unreadable.count - 1:,} more" if unreadable.count > 1 else ""
        remedy = "fix or remove it" + (", or omit --strict" if readable else "")
        raise ValueError(f"{collection.path}: {name} cannot be read ({reason}){more}: {remedy}")
    if not readable:
        raise ValueError(f"{collection.path} does not contain any {collection.reads} to index")


def _is_current(
    previous: GalleryInfo,
    listed: _Listed,
    computed: int,
    work: WorkFolder,
    settings: GallerySettings,
) -> bool:
    """Return whether the gallery is up to date: no item is new, removed or changed."""
    same_items = computed == 0 and listed.in_gallery == listed.reused == previous.num_items
    sha256 = hashlib.sha256(work.unreadable.read_bytes()).hexdigest()
    return (
        same_items
        and sha256 == previous.files[UNREADABLE].sha256
        and GallerySettings.of(previous) == settings
    )


def thumbnail(raw: bytes, max_pixels: int = MAX_PIXELS) -> bytes:
    """Convert an image file to a JPEG whose longer side is at most `THUMBNAIL_SIDE` pixels.

    `raw` must be a file that `decode` accepts. Raises ValueError if it cannot be decoded.
    """
    pixels = _reduced_jpeg(raw)
    if pixels is None:
        pixels = np.ascontiguousarray(decode(raw, 3, max_pixels)[:, :, ::-1])
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
