"""Index a collection: list it, compute what is new, assemble the gallery, move it into place.

A kill at any point loses only seconds of work and leaves the previous gallery unchanged.
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
from data.images.headers import jpeg_size
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
from serving.galleries.work_folder import About, WorkFolder, work_folder
from serving.model import Model

Report = Callable[[int, int], None]

_SECONDS_BETWEEN_COMMITS = 10.0
THUMBNAIL_SIDE = 160  # maximum length of the longer side in pixels
_QUALITY = 80
# JPEG decoders can decode at a fraction of the size, in a fraction of the time.
_REDUCED = {
    8: cv2.IMREAD_REDUCED_COLOR_8,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    2: cv2.IMREAD_REDUCED_COLOR_2,
}


@dataclass(frozen=True)
class IndexOptions:
    """How to build a gallery.

    - `batch_size`: images or texts per forward pass.
    - `threads`: number of threads that read and decode.
    - `strict`: fail if an item cannot be read.
    - `force`: update the gallery even if it was built from another source.
    """

    batch_size: int = 32
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    thumbnails: bool = True
    strict: bool = False
    force: bool = False


@dataclass(frozen=True)
class IndexResult:
    """The result of a run. `kept`: items that were computed before. `dropped`: items of the
    previous gallery that were removed or changed. `unreadable`: the first few of those that `info`
    counts."""

    info: GalleryInfo
    computed: int
    kept: int
    dropped: int
    ignored: int
    unreadable: Sequence[Unreadable]


@dataclass(frozen=True)
class _Listed:
    """Counts of items: computed before, contained in the gallery (a subset of these), and to
    compute."""

    kept: int
    in_gallery: int
    missing: int


@dataclass(frozen=True)
class _Ready:
    item: Item
    prepared: Any
    thumbnail: bytes


def index_collection(
    model: Model,
    collection: Collection,
    path: Path,
    how: IndexOptions,
    *,
    computing: Report = lambda done, total: None,
    writing: Report = lambda done, total: None,
) -> IndexResult:
    """Create or update the gallery `path` of `collection`.

    Raises ValueError if there is nothing to index, if `path` contains something else, or, if
    `how.strict`, if an item cannot be read; OSError if the disk is full. The same call then
    resumes.
    """
    about = _about(model, collection, how)
    with work_folder(path, about, force=how.force) as work, ExitStack() as opened:
        before = read_info(path) if path.exists() else None
        rows = [_open(opened, folder, about) for folder in work.indexed()]
        unreadable = opened.enter_context(UnreadableFile(work.unreadable))
        listed = _list(collection, work, rows, unreadable)
        with RowWriter(work.new_part(), dim=about.dim) as part:
            prepare = partial(_prepare, model, collection, with_thumbnail=about.thumbnails)
            with closing(_prepared(prepare, read_items(work.missing), how)) as prepared:
                _compute(model, prepared, listed.missing, part, unreadable, how, computing)
        unreadable.flush()
        _check(collection, listed.kept + part.count, unreadable, strict=how.strict)
        if before is None or not _is_current(before, listed, part.count, work, about):
            rows.append(_open(opened, part.path, about))
            info = assemble(work, about, rows, listed.kept + part.count, unreadable.count, writing)
            work.publish()
        else:
            info = before
    dropped = before.num_items - listed.in_gallery if before is not None else 0
    return IndexResult(
        info, part.count, listed.kept, dropped, collection.ignored, tuple(unreadable.first)
    )


def _about(model: Model, collection: Collection, how: IndexOptions) -> About:
    return About(
        reads=model.reads,
        backbone=features_identity(model.bundle),
        dim=model.bundle.spec.dim,
        thumbnails=how.thumbnails and model.reads == "images",
        source=shown_name(str(collection.path.resolve())),
    )


def _open(opened: ExitStack, folder: Path, about: About) -> RowReader:
    return opened.enter_context(closing(RowReader(folder, dim=about.dim)))


def _list(
    collection: Collection, work: WorkFolder, rows: Sequence[RowReader], unreadable: UnreadableFile
) -> _Listed:
    """Write the listing of all items, and of those that no row contains unchanged."""
    kept = in_gallery = missing = 0

    def items() -> Iterator[Item]:
        for one in collection.items():
            if isinstance(one, Unreadable):
                unreadable.add(one)
            else:
                yield one

    with work.listing.open("wb") as listing, work.missing.open("wb") as new:
        for item, found in matched_items(items(), rows, order_of(collection.reads)):
            listing.write(item_line(item))
            if found is None:
                new.write(item_line(item))
                missing += 1
            else:
                kept += 1
                in_gallery += found.rows.path == work.gallery
    return _Listed(kept, in_gallery, missing)


def _prepared(
    prepare: Callable[[Item], _Ready | Unreadable], items: Iterator[Item], how: IndexOptions
) -> Generator[_Ready | Unreadable, None, None]:
    """Read and decode items in threads, in order, only as far ahead as the model needs."""
    pool = ThreadPoolExecutor(how.threads, "decode")
    try:
        yield from in_order(pool, prepare, items, ahead=2 * how.batch_size + how.threads)
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare(
    model: Model, collection: Collection, item: Item, *, with_thumbnail: bool
) -> _Ready | Unreadable:
    try:
        raw = collection.read(item)
        prepared = model.prepare(raw)
        small = thumbnail(raw) if with_thumbnail and isinstance(raw, bytes) else b""
    except OSError as error:
        return Unreadable(item.name, error.strerror or str(error))
    except ValueError as error:
        return Unreadable(item.name, str(error))
    return _Ready(collection.shown(item, raw), prepared, small)


def _compute(
    model: Model,
    prepared: Iterator[_Ready | Unreadable],
    missing: int,
    part: RowWriter,
    unreadable: UnreadableFile,
    how: IndexOptions,
    report: Report,
) -> None:
    """Compute the features of prepared items and append them to `part` in order."""
    size = max(1, how.batch_size // model.crops)
    done, committed = 0, time.monotonic()
    while batch := list(islice(prepared, size)):
        for one in batch:
            if isinstance(one, Unreadable):
                unreadable.add(one)
        _append(model, [one for one in batch if isinstance(one, _Ready)], part, unreadable)
        done += len(batch)
        if time.monotonic() - committed >= _SECONDS_BETWEEN_COMMITS:
            part.commit()
            committed = time.monotonic()
        report(done, missing)


def _append(
    model: Model, ready: Sequence[_Ready], part: RowWriter, unreadable: UnreadableFile
) -> None:
    if not ready:
        return
    features = model.features([one.prepared for one in ready])
    finite = features.isfinite().all(1).tolist()
    for one, row, is_finite in zip(ready, features.numpy(), finite, strict=True):
        if is_finite:
            part.append(one.item, row, one.thumbnail)
        else:
            unreadable.add(Unreadable(one.item.name, "the model gives it no finite features"))


def _check(
    collection: Collection, readable: int, unreadable: UnreadableFile, *, strict: bool
) -> None:
    if unreadable.count and (strict or not readable):
        name, reason = unreadable.first[0]
        more = f" and {unreadable.count - 1:,} more" if unreadable.count > 1 else ""
        remedy = "mend or remove it" + (", or leave out --strict" if readable else "")
        raise ValueError(f"{collection.path}: {name} cannot be read ({reason}){more}: {remedy}")
    if not readable:
        what = collection.reads
        raise ValueError(f"{collection.path} holds no {what}: there is nothing to index")


def _is_current(
    before: GalleryInfo, listed: _Listed, computed: int, work: WorkFolder, about: About
) -> bool:
    """Whether nothing is new, removed or changed, so that the gallery can be kept."""
    same_items = computed == 0 and listed.in_gallery == listed.kept == before.num_items
    sha256 = hashlib.sha256(work.unreadable.read_bytes()).hexdigest()
    return same_items and sha256 == before.files[UNREADABLE].sha256 and About.of(before) == about


def thumbnail(raw: bytes, max_pixels: int = MAX_PIXELS) -> bytes:
    """An image file -> a JPEG whose longer side has at most `THUMBNAIL_SIDE` pixels.

    `raw` must have been decoded successfully by `decode` before. Raises ValueError if it cannot be
    decoded.
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
    """Pixels [H, W, 3] (BGR) of a JPEG that is much larger than its thumbnail; None for other
    files."""
    size = jpeg_size(raw)
    fraction = max(size) // THUMBNAIL_SIDE if size is not None else 1
    for times, flag in _REDUCED.items():
        if fraction >= times:
            return cv2.imdecode(np.frombuffer(raw, np.uint8), flag)
    return None
