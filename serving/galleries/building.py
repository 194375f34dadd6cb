"""Build a gallery: compute the features and thumbnails of all items of a collection."""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from data.files import explained, sha256_of
from data.images.decode import MAX_PIXELS, decode, resize
from data.processes import in_order
from data.progress import Report
from serving.galleries.collection import Collection, Entry
from serving.galleries.gallery import (
    DATA_FILES,
    FEATURES,
    FORMAT_VERSION,
    GALLERY,
    UNREADABLE,
    FileInfo,
    GalleryInfo,
    Item,
    Row,
    RowWriter,
    features_identity,
    map_matrix,
    read_info,
    shown_name,
)
from serving.galleries.index import INDEX
from serving.galleries.indexing import LEAST_ITEMS, build_index
from serving.galleries.searching import supports_index
from serving.model import Model
from trainer.bundle.writing import published_folder

THUMBNAIL_SIDE = 160  # maximum length in pixels of the longer side
_QUALITY = 80
# Longer texts are truncated for display.
_MAX_SHOWN_CHARS = 500


class Unreadable(NamedTuple):
    """An entry of a collection that cannot be read."""

    name: str
    reason: str


class _Prepared(NamedTuple):
    item: Item
    input: Any
    thumbnail: bytes


def index_collection(
    model: Model,
    collection: Collection,
    path: Path,
    *,
    batch_size: int = 32,
    threads: int | None = None,
    thumbnails: bool = True,
    strict: bool = False,
    force: bool = False,
    index: bool | None = None,
    report: Report = lambda done, total: None,
) -> GalleryInfo:
    """Create the gallery of `collection` at `path`, or replace it. Returns its description.

    - `batch_size`: number of texts or image crops per forward pass.
    - `threads`: number of threads that read and decode items. Default: one per core.
    - `thumbnails`: compute thumbnails of images.
    - `strict`: raise an error if an item cannot be read.
    - `force`: replace the gallery even if it was created from a different source.
    - `index`: build an approximate index. None: only for more than 200,000 items.
    - `report`: progress callback that receives (items done, total).

    The gallery at `path` does not change until the new one is complete. Raises ValueError if the
    collection is empty, if `path` exists but is not a gallery of this collection, if the model does
    not support a requested index, or, with `strict`, if an item cannot be read. Raises OSError if
    the disk is full.
    """
    spec, source = model.bundle.spec, shown_name(str(collection.path.resolve()))
    if index and not supports_index(model.bundle):
        raise ValueError(
            f"{model.bundle.path} compares {spec.loss.score} scores, which an approximate index "
            "does not support: omit --index"
        )
    with_thumbnails = thumbnails and spec.reads == "images"
    _check_replaceable(path, source, force=force)
    total = sum(1 for _ in collection.entries())
    report(0, total)
    with published_folder(path, replace=True) as folder, explained(path):
        unreadable: list[Unreadable] = []
        with closing(RowWriter(folder, spec.dim)) as rows:
            for one in _rows(model, collection, batch_size, threads, with_thumbnails):
                if isinstance(one, Row):
                    rows.add(one)
                else:
                    unreadable.append(one)
                report(rows.num_rows + len(unreadable), total)
        if unreadable and (strict or not rows.num_rows):
            name, reason = unreadable[0]
            more = f" and {len(unreadable) - 1:,} more" if len(unreadable) > 1 else ""
            remedy = "fix or remove it" + (", or omit --strict" if rows.num_rows else "")
            raise ValueError(f"{collection.path}: {name} cannot be read ({reason}){more}: {remedy}")
        if not rows.num_rows:
            raise ValueError(f"{collection.path} does not contain any {collection.reads} to index")
        lines = b"".join(json.dumps(one._asdict()).encode() + b"\n" for one in unreadable)
        (folder / UNREADABLE).write_bytes(lines)
        if index is None:
            index = rows.num_rows > LEAST_ITEMS and supports_index(model.bundle)
        built = None
        if index:
            features = map_matrix(folder / FEATURES, "<f4", (rows.num_rows, spec.dim))
            built = build_index(features, folder / INDEX, model.bundle)
        info = GalleryInfo(
            reads=spec.reads,
            backbone=features_identity(model.bundle),
            source=source,
            dim=spec.dim,
            thumbnails=with_thumbnails,
            num_items=rows.num_rows,
            unreadable=len(unreadable),
            format_version=1 if built is None else FORMAT_VERSION,
            index=built,
            files={
                file.name: FileInfo(bytes=file.stat().st_size, sha256=sha256_of(file))
                for file in map(folder.joinpath, (*DATA_FILES, INDEX) if index else DATA_FILES)
            },
        )
        (folder / GALLERY).write_text(info.model_dump_json(indent=1) + "\n")
    return info


def _check_replaceable(path: Path, source: str, *, force: bool) -> None:
    if not (path / GALLERY).is_file():
        if path.exists():
            raise ValueError(f"{path} exists, but it is not a gallery: pass another path")
    elif (found := read_info(path).source) != source and not force:
        raise ValueError(
            f"{path} was created from {found}, not from {source}: pass another path with --out, "
            "or --force if the collection has moved"
        )


def _rows(
    model: Model,
    collection: Collection,
    batch_size: int,
    threads: int | None,
    with_thumbnails: bool,
) -> Iterator[Row | Unreadable]:
    """Yield the rows of all items in order. Threads read and decode items slightly ahead of the
    model."""
    num_items = max(1, batch_size // model.crops)
    threads = threads or os.cpu_count() or 1
    prepare = partial(_prepare, model, with_thumbnails)
    with ThreadPoolExecutor(threads, "decode") as pool:
        prepared = in_order(pool, prepare, collection.entries(), ahead=2 * num_items + threads)
        try:
            while batch := list(islice(prepared, num_items)):
                yield from _computed(model, batch)
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare(model: Model, with_thumbnail: bool, entry: Entry) -> _Prepared | Unreadable:
    try:
        raw = entry.read()
        prepared = model.prepare(raw)
        if isinstance(raw, str):
            is_short = len(raw) <= _MAX_SHOWN_CHARS
            shown = raw if is_short else raw[: _MAX_SHOWN_CHARS - 1] + "…"
            return _Prepared(Item(entry.name, shown), prepared, b"")
        jpeg = thumbnail(raw) if with_thumbnail else b""
        return _Prepared(Item(entry.name), prepared, jpeg)
    except (OSError, ValueError) as error:
        # Without the path, which callers print anyway.
        return Unreadable(entry.name, getattr(error, "strerror", None) or str(error))


def _computed(model: Model, batch: Sequence[_Prepared | Unreadable]) -> Iterator[Row | Unreadable]:
    inputs = [one.input for one in batch if isinstance(one, _Prepared)]
    features = iter(model.features(inputs).numpy() if inputs else ())
    for one in batch:
        if isinstance(one, Unreadable):
            yield one
        elif np.isfinite(row := next(features)).all():
            yield Row(one.item, row, one.thumbnail)
        else:
            yield Unreadable(one.item.name, "the features computed by the model are not finite")


def thumbnail(raw: bytes) -> bytes:
    """Convert an image file to a JPEG whose longer side is at most `THUMBNAIL_SIDE` pixels. Raises
    ValueError if it cannot be decoded."""
    pixels = np.ascontiguousarray(decode(raw, 3, MAX_PIXELS)[:, :, ::-1])
    scale = THUMBNAIL_SIDE / max(pixels.shape[:2])
    if scale < 1:
        height, width = (max(1, round(side * scale)) for side in pixels.shape[:2])
        pixels = resize(pixels, height, width)
    return cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1].tobytes()
