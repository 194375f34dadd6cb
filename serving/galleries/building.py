"""Build a gallery: compute the features and thumbnails of all items of a collection, and the
approximate index.

The number of lists that a search reads is the smallest power of two that reaches `TARGET_RECALL`,
and at most 1/8 of the lists.
"""

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

from data.files import explained, published_folder, sha256_of
from data.images.decode import MAX_PIXELS, decode, resize
from data.processes import in_order
from data.progress import Report
from heads.logit_maps import inverse_norms_of
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
from serving.galleries.index import (
    INDEX,
    MAX_HITS,
    TARGET_RECALL,
    ApproximateIndex,
    IndexInfo,
    import_faiss,
)
from serving.galleries.searching import best, class_scores, supports_index
from serving.model import Model
from trainer.bundle.bundle import Bundle

THUMBNAIL_SIDE = 160  # maximum length in pixels of the longer side
_QUALITY = 80
# Longer texts are truncated for display.
_MAX_SHOWN_CHARS = 500
# `kway index` indexes larger galleries by default.
LEAST_ITEMS = 200_000
# Training time is proportional to the product of these numbers.
_ITERATIONS, _SAMPLES_PER_LIST = 10, 40
_MAX_QUERIES = 200
_MAX_SHARE = 8  # a search reads at most 1/8 of the lists; exact search is about as fast as more
_BLOCK = 65_536

# Shape legend: N items, d dimensions.


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
    force: bool = False,
    index: bool | None = None,
    report: Report = lambda done, total: None,
) -> GalleryInfo:
    """Create the gallery of `collection` at `path`, or replace it. Returns its description.

    - `batch_size`: number of texts or image crops per forward pass.
    - `threads`: number of threads that read and decode items. Default: one per core.
    - `thumbnails`: compute thumbnails of images.
    - `force`: replace the gallery even if it was created from a different source.
    - `index`: build an approximate index. None: only for more than 200,000 items.
    - `report`: progress callback that receives (items done, total).

    The gallery at `path` does not change until the new one is complete. Raises ValueError if the
    collection is empty, if `path` exists but is not a gallery of this collection, if the model does
    not support a requested index, or if no item can be read. Raises OSError if the disk is full.
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
        if not rows.num_rows:
            first = [f": {one.name} cannot be read ({one.reason})" for one in unreadable[:1]]
            message = f"{collection.path} does not contain any {collection.reads} to index"
            raise ValueError("".join([message, *first]))
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


# ---------------------------------------------------------------------- the approximate index


def build_index(features_Nd: np.ndarray, path: Path, bundle: Bundle) -> IndexInfo:
    """Write the index of `features_Nd`, float32 [N, d], to `path`, and measure its recall with
    classes of `bundle`.

    Memory use is d bytes per item. Raises ValueError if faiss is not installed.
    """
    faiss, spec = import_faiss(), bundle.spec
    num_items, dim = features_Nd.shape
    norms = inverse_norms_of(features_Nd) if spec.logits.normalizes else None

    def indexed(items: slice) -> np.ndarray:
        return features_Nd[items] * (1 if norms is None else norms[items, None])

    num_lists = max(1, min(round(2 * num_items**0.5), num_items // _SAMPLES_PER_LIST))
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatL2(dim),
        dim,
        num_lists,
        faiss.ScalarQuantizer.QT_8bit,
        faiss.METRIC_INNER_PRODUCT,
        False,  # quantize the features, not their differences from the centers
    )
    index.cp.niter, index.cp.min_points_per_centroid = _ITERATIONS, 1
    index.train(indexed(slice(None, None, max(1, num_items // (num_lists * _SAMPLES_PER_LIST)))))
    for first in range(0, num_items, _BLOCK):
        index.add(indexed(slice(first, first + _BLOCK)))
    faiss.write_index(index, str(path))
    del index  # the opened file is mapped, so only one copy is in memory

    last = spec.num_classes - 1
    class_ids = np.unique(np.linspace(0, last, _MAX_QUERIES).astype(int)).tolist()
    rows = [bundle.rows([class_id]) for class_id in class_ids]
    expected = [
        best(class_scores(features_Nd, row, spec.logits, spec.loss, norms), 0, MAX_HITS)
        for row in rows
    ]
    most, num_probes = max(1, num_lists // _MAX_SHARE), 1
    while True:
        opened = ApproximateIndex(path, features_Nd.shape, num_probes)
        found = []
        for row in rows:
            items = opened.candidates(row.rows[0].numpy())
            scores = class_scores(features_Nd[items], row, spec.logits, spec.loss)
            found.append(items[best(scores, 0, MAX_HITS)])
        recall = {depth: _recall(expected, found, depth) for depth in (10, MAX_HITS)}
        if recall[MAX_HITS] >= TARGET_RECALL or num_probes == most:
            return IndexInfo(
                num_lists=num_lists,
                num_probes=num_probes,
                is_normalized=norms is not None,
                num_queries=len(rows),
                recall=recall,
            )
        num_probes = min(2 * num_probes, most)


def _recall(expected: list[np.ndarray], found: list[np.ndarray], depth: int) -> float:
    """Return the mean share of the best items that were found. In a small gallery, the depth is at
    most its number of items."""
    pairs = zip(expected, found, strict=True)
    return float(np.mean([np.isin(one[:depth], other[:depth]).mean() for one, other in pairs]))
