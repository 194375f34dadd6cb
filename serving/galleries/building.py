"""Build a gallery: write the rows of all items of the collection to the work folder, which computes
the features of new items, and publish them.

If the process is killed, at most ten seconds of work are lost, and the previous gallery remains
intact. Memory use is about 16 bytes per item, plus a batch of rows.
"""

import hashlib
import json
import time
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from data.files import commit, sha256_of, sync
from data.progress import Report
from serving.galleries.collection import Collection, Unreadable
from serving.galleries.features import rows_of
from serving.galleries.format import (
    DATA_FILES,
    FEATURES,
    GALLERY,
    INDEX,
    UNREADABLE,
    FileInfo,
    GalleryInfo,
    GallerySettings,
    Item,
    features_identity,
    shown_name,
)
from serving.galleries.gallery import Row, Rows, RowWriter, map_matrix
from serving.galleries.index import LEAST_ITEMS, build_index, sample_classes, supports_index
from serving.galleries.work_folder import work_folder
from serving.model import Model
from trainer.bundle.bundle import Bundle

_SECONDS_BETWEEN_COMMITS = 10.0
_MAX_NAMED = 5


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
) -> IndexResult:
    """Create or update the gallery of `collection` at `path`.

    - `batch_size`: number of texts or image crops per forward pass.
    - `threads`: number of threads that read and decode items. Default: one per core.
    - `thumbnails`: compute thumbnails of images.
    - `strict`: raise an error if an item cannot be read.
    - `force`: update the gallery even if it was created from a different source.
    - `index`: build an approximate index. None: only for more than 200,000 items.
    - `report`: progress callback that receives (items done, total).

    Raises ValueError if the collection is empty, if `path` exists but is not a gallery of this
    collection, if the model does not support a requested index, or, with `strict`, if an item
    cannot be read. Raises OSError if the disk is full. After an error, repeat the call to resume.
    """
    bundle = model.bundle
    if index and not supports_index(bundle):
        raise ValueError(
            f"{bundle.path} compares {bundle.spec.loss.score} scores, which an approximate index "
            "does not support: omit --index"
        )
    settings = GallerySettings(
        reads=bundle.spec.reads,
        backbone=features_identity(bundle),
        dim=bundle.spec.dim,
        thumbnails=thumbnails and bundle.spec.reads == "images",
        source=shown_name(str(collection.path.resolve())),
    )
    with work_folder(path, settings, bundle, force=force) as work:
        known = _Known(work.earlier())
        numbers = array("q", map(known.number_of, collection.items()))
        previous = work.previous
        has_index = previous is not None and previous.index is not None
        if index is None:
            index = len(numbers) > LEAST_ITEMS and supports_index(bundle)
        if (
            previous is not None
            and not previous.unreadable
            and numbers == array("q", range(previous.num_items))
            and has_index == index
            and previous.model_dump(include=set(settings.model_dump())) == settings.model_dump()
        ):
            return IndexResult(previous, 0, previous.num_items, 0, collection.ignored, ())
        folder = work.path / f"rows-{len(work.saved()):06}"
        batches = rows_of(
            model,
            collection,
            known.row_of,
            batch_size=batch_size,
            threads=threads,
            with_thumbnails=settings.thumbnails,
        )
        unreadable: list[Unreadable] = []
        num_computed = done = 0
        saved = time.monotonic()
        report(0, len(numbers))
        with closing(RowWriter(folder, settings.dim)) as rows, closing(batches):
            for batch in batches:
                for one in batch:
                    if isinstance(one, Row):
                        rows.add(one)
                        num_computed += one.is_new
                    else:
                        unreadable.append(one)
                if time.monotonic() - saved >= _SECONDS_BETWEEN_COMMITS:
                    rows.save()
                    saved = time.monotonic()
                done += len(batch)
                report(done, len(numbers))
        if unreadable and (strict or not rows.num_rows):
            name, reason = unreadable[0]
            more = f" and {len(unreadable) - 1:,} more" if len(unreadable) > 1 else ""
            remedy = "fix or remove it" + (", or omit --strict" if rows.num_rows else "")
            raise ValueError(f"{collection.path}: {name} cannot be read ({reason}){more}: {remedy}")
        if not rows.num_rows:
            raise ValueError(f"{collection.path} does not contain any {collection.reads} to index")
        lines = b"".join(json.dumps(one._asdict()).encode() + b"\n" for one in unreadable)
        commit(folder / UNREADABLE, lines)
        info = GalleryInfo(
            **settings.model_dump(),
            num_items=rows.num_rows,
            unreadable=len(unreadable),
            files={name: _described(folder / name) for name in DATA_FILES},
        )
        if previous is not None and _without_index(previous) == info and has_index == index:
            info = previous  # servers need not load it again
        else:
            if index:
                info = _with_index(folder, info, bundle)
            commit(folder / GALLERY, info.model_dump_json(indent=1).encode() + b"\n")
            work.publish(folder)
    num_previous = 0 if previous is None else previous.num_items
    return IndexResult(
        info,
        computed=num_computed,
        reused=info.num_items - num_computed,
        dropped=num_previous - sum(0 <= number < num_previous for number in numbers),
        ignored=collection.ignored,
        unreadable=tuple(unreadable[:_MAX_NAMED]),
    )


class _Known:
    """The rows of earlier runs, numbered consecutively over their folders."""

    def __init__(self, folders: Sequence[Rows]) -> None:
        self._folders = folders
        self._starts = [0, *accumulate(rows.num_items for rows in folders)]
        items = (rows.item(i) for rows in folders for i in range(rows.num_items))
        # Sorted hashes take 16 bytes per row, a fraction of a dictionary.
        keys = np.fromiter(map(_key, items), np.uint64, self._starts[-1])
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def number_of(self, item: Item | Unreadable) -> int:
        """Return the number of the row of this version of the item, or -1 if there is none."""
        if isinstance(item, Unreadable):
            return -1
        key = np.uint64(_key(item))
        first, end = self._keys.searchsorted(key), self._keys.searchsorted(key, "right")
        for number in self._order[first:end].tolist():
            rows, index = self._located(number)
            if rows.item(index)[:3] == item[:3]:
                return int(number)
        return -1

    def row_of(self, item: Item) -> Row | None:
        number = self.number_of(item)
        if number < 0:
            return None
        rows, index = self._located(number)
        item = item._replace(text=rows.item(index).text)
        return Row(item, rows.features[index], rows.thumbnail(index))

    def _located(self, number: int) -> tuple[Rows, int]:
        folder = bisect_right(self._starts, number) - 1
        return self._folders[folder], number - self._starts[folder]


def _key(item: Item) -> int:
    return int.from_bytes(hashlib.blake2b(repr(item[:3]).encode(), digest_size=8).digest())


def _with_index(folder: Path, info: GalleryInfo, bundle: Bundle) -> GalleryInfo:
    """Build the approximate index of the rows in `folder`, and add it to their description."""
    index = build_index(
        map_matrix(folder / FEATURES, "<f4", (info.num_items, info.dim)),
        folder / INDEX,
        classes_Qd=sample_classes(bundle),
        normalizes=bundle.spec.logits.normalizes,
    )
    sync(folder / INDEX)
    # Earlier versions of kway can read format 1.
    files = {**info.files, INDEX: _described(folder / INDEX)}
    return info.model_copy(update={"index": index, "format_version": 2, "files": files})


def _without_index(info: GalleryInfo) -> GalleryInfo:
    files = {name: info.files[name] for name in DATA_FILES}
    return info.model_copy(update={"index": None, "format_version": 1, "files": files})


def _described(file: Path) -> FileInfo:
    return FileInfo(bytes=file.stat().st_size, sha256=sha256_of(file))
