"""Build a gallery: list the collection, compute the features of new items, and write and publish
the gallery.

If the process is killed, at most ten seconds of work are lost, and the previous gallery remains
intact. Memory use is about 24 bytes per item, plus the rows of ten seconds.
"""

import hashlib
import json
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from data.files import commit, sha256_of, sync
from data.progress import Report
from serving.galleries.collection import Collection, Unreadable
from serving.galleries.features import computed_rows
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
    item_line,
    read_items,
    shown_name,
)
from serving.galleries.gallery import Row, Rows, map_matrix, write_rows
from serving.galleries.index import LEAST_ITEMS, build_index, sample_classes, supports_index
from serving.galleries.work_folder import WorkFolder, work_folder
from serving.model import Model
from trainer.bundle.bundle import Bundle

_SECONDS_BETWEEN_COMMITS, _MAX_ROWS_BETWEEN_COMMITS = 10.0, 10_000
_REPORT_EVERY = 1000
_MAX_NAMED = 5
_MISSING = -1


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
    computing: Report = lambda done, total: None,
    writing: Report = lambda done, total: None,
) -> IndexResult:
    """Create or update the gallery of `collection` at `path`.

    - `batch_size`: number of texts or image crops per forward pass.
    - `threads`: number of threads that read and decode items. Default: one per core.
    - `thumbnails`: compute thumbnails of images.
    - `strict`: raise an error if an item cannot be read.
    - `force`: update the gallery even if it was created from a different source.
    - `index`: build an approximate index. None: only for more than 200,000 items.
    - `computing`, `writing`: progress callbacks that receive (items done, total).

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
        unreadable: list[Unreadable] = []
        earlier = _NumberedRows(work.rows())
        numbers = _list(collection, work, earlier, unreadable)
        listed = zip(read_items(work.listing), numbers, strict=True)
        missing = (item for item, number in listed if number == _MISSING)
        batches = computed_rows(model, collection, missing, batch_size, threads, thumbnails)
        with closing(batches):
            num_missing = numbers.count(_MISSING)
            num_computed = _save(batches, work, unreadable, computing, num_missing)
        num_reused = len(numbers) - num_missing
        num_items = num_reused + num_computed
        if unreadable and (strict or not num_items):
            name, reason = unreadable[0]
            more = f" and {len(unreadable) - 1:,} more" if len(unreadable) > 1 else ""
            remedy = "fix or remove it" + (", or omit --strict" if num_items else "")
            raise ValueError(f"{collection.path}: {name} cannot be read ({reason}){more}: {remedy}")
        if not num_items:
            raise ValueError(f"{collection.path} does not contain any {collection.reads} to index")

        info = work.previous
        num_previous = 0 if info is None else info.num_items
        num_kept = sum(0 <= number < num_previous for number in numbers)
        if index is None:
            index = num_items > LEAST_ITEMS and supports_index(bundle)
        lines = b"".join(json.dumps(one._asdict()).encode() + b"\n" for one in unreadable)
        if (
            info is None
            or not num_items == num_kept == num_previous
            or index != (info.index is not None)
            or hashlib.sha256(lines).hexdigest() != info.files[UNREADABLE].sha256
            or info.model_dump(include=set(GallerySettings.model_fields)) != settings.model_dump()
        ):
            rows = _merged(work, numbers, len(earlier), num_items, writing)
            write_rows(work.finished, rows, num_items, settings.dim)
            commit(work.finished / UNREADABLE, lines)
            info = _finish(
                work.finished, bundle, settings, num_items, len(unreadable), with_index=index
            )
            work.publish()
    return IndexResult(
        info,
        computed=num_computed,
        reused=num_reused,
        dropped=num_previous - num_kept,
        ignored=collection.ignored,
        unreadable=tuple(unreadable[:_MAX_NAMED]),
    )


class _NumberedRows:
    """The rows of several folders, numbered consecutively."""

    def __init__(self, folders: Sequence[Rows]) -> None:
        self._folders = folders
        self._starts = [0, *accumulate(rows.num_items for rows in folders)]

    def __len__(self) -> int:
        return self._starts[-1]

    def located(self, number: int) -> tuple[Rows, int]:
        """Return the folder of a row, and the index of the row in it."""
        folder = bisect_right(self._starts, number) - 1
        return self._folders[folder], number - self._starts[folder]

    def item(self, number: int) -> Item:
        rows, index = self.located(number)
        return rows.item(index)

    def items(self) -> Iterator[Item]:
        for rows in self._folders:
            yield from map(rows.item, range(rows.num_items))


def _list(
    collection: Collection,
    work: WorkFolder,
    earlier: _NumberedRows,
    unreadable: list[Unreadable],
) -> "array[int]":
    """Write the listing. Return the number of the row of each item, or `_MISSING` if there is no
    row of this version of the item."""
    # Sorted hashes take 16 bytes per row, a fraction of a dictionary.
    keys = np.fromiter(map(_key, earlier.items()), np.uint64, len(earlier))
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    numbers = array("q")
    with work.listing.open("wb") as listing:
        for item in collection.items():
            if isinstance(item, Unreadable):
                unreadable.append(item)
                continue
            listing.write(item_line(item))
            key = np.uint64(_key(item))
            first, end = keys.searchsorted(key), keys.searchsorted(key, "right")
            same = (n for n in order[first:end].tolist() if earlier.item(n)[:3] == item[:3])
            numbers.append(next(same, _MISSING))
    return numbers


def _key(item: Item) -> int:
    return int.from_bytes(hashlib.blake2b(repr(item[:3]).encode(), digest_size=8).digest())


def _save(
    batches: Iterable[Sequence[Row | Unreadable]],
    work: WorkFolder,
    unreadable: list[Unreadable],
    report: Report,
    num_missing: int,
) -> int:
    """Save the computed rows every ten seconds. Return their number."""
    unsaved: list[Row] = []
    done, num_saved, saved = 0, 0, time.monotonic()
    report(0, num_missing)
    try:
        for batch in batches:
            unsaved += (one for one in batch if isinstance(one, Row))
            unreadable += (one for one in batch if isinstance(one, Unreadable))
            done += len(batch)
            is_due = time.monotonic() - saved >= _SECONDS_BETWEEN_COMMITS
            if is_due or len(unsaved) >= _MAX_ROWS_BETWEEN_COMMITS:
                work.save(unsaved)
                num_saved, saved = num_saved + len(unsaved), time.monotonic()
                unsaved = []
            report(done, num_missing)
    finally:
        work.save(unsaved)  # also after an interrupt
    return num_saved + len(unsaved)


def _merged(
    work: WorkFolder, numbers: "array[int]", num_earlier: int, num_items: int, report: Report
) -> Iterator[Row]:
    """Yield the rows of the gallery. The next computed row belongs to the next item without an
    earlier row, unless this item is unreadable."""
    rows, computed = _NumberedRows(work.rows()), num_earlier
    written = 0
    for item, number in zip(read_items(work.listing), numbers, strict=True):
        if number == _MISSING:
            if computed == len(rows) or rows.item(computed).name != item.name:
                continue
            number, computed = computed, computed + 1
        folder, index = rows.located(number)
        item = item._replace(text=folder.item(index).text)
        yield Row(item, folder.features[index], folder.thumbnail(index))
        written += 1
        if written % _REPORT_EVERY == 0 or written == num_items:
            report(written, num_items)
    assert written == num_items


def _finish(
    folder: Path,
    bundle: Bundle,
    settings: GallerySettings,
    num_items: int,
    num_unreadable: int,
    *,
    with_index: bool,
) -> GalleryInfo:
    """Build the index, and write the description of the gallery last."""
    index = None
    if with_index:
        index = build_index(
            map_matrix(folder / FEATURES, "<f4", (num_items, settings.dim)),
            folder / INDEX,
            classes_Qd=sample_classes(bundle),
            normalizes=bundle.spec.logits.normalizes,
        )
        sync(folder / INDEX)
    info = GalleryInfo(
        **settings.model_dump(),
        format_version=1 if index is None else 2,  # earlier versions can read format 1
        num_items=num_items,
        unreadable=num_unreadable,
        index=index,
        files={
            name: FileInfo(bytes=(folder / name).stat().st_size, sha256=sha256_of(folder / name))
            for name in (DATA_FILES if index is None else (*DATA_FILES, INDEX))
        },
    )
    commit(folder / GALLERY, info.model_dump_json(indent=1).encode() + b"\n")
    return info
