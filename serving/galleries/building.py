"""Build a gallery: list the collection, compute the features of new items, and write and publish
the gallery.

If the process is killed, at most ten seconds of work are lost, and the previous gallery remains
intact.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from data.progress import Report
from serving.galleries.assembling import assemble, matched_items
from serving.galleries.collection import Collection, Unreadable, UnreadableFile
from serving.galleries.features import Batch, Encoder, FeatureOptions, Row
from serving.galleries.format import (
    UNREADABLE,
    GalleryInfo,
    IndexInfo,
    Item,
    features_identity,
    item_line,
    order_of,
    read_info,
    read_items,
    shown_name,
)
from serving.galleries.index import LEAST_ITEMS, build_index, sample_classes, supports_index
from serving.galleries.rows import RowReader, RowWriter
from serving.galleries.work_folder import GallerySettings, WorkFolder, work_folder
from trainer.bundle.bundle import Bundle

_SECONDS_BETWEEN_COMMITS = 10.0


@dataclass(frozen=True)
class IndexOptions(FeatureOptions):
    """Options for building a gallery.

    - `strict`: raise an error if an item cannot be read.
    - `force`: update the gallery even if it was created from a different source.
    - `index`: build an approximate index. None: only for more than 200,000 items.
    """

    strict: bool = False
    force: bool = False
    index: bool | None = None


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


def index_collection(
    encoder: Encoder,
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
    collection, if the model does not support a requested index, or, with `options.strict`, if an
    item cannot be read. Raises OSError if the disk is full. After an error, repeat the call to
    resume.
    """
    settings = _settings(encoder.bundle, collection, options)
    if options.index and not supports_index(encoder.bundle):
        raise ValueError(
            f"{encoder.bundle.path} compares {encoder.bundle.spec.loss.score} scores, which an "
            "approximate index does not support: omit --index"
        )
    with work_folder(path, settings, force=options.force) as work, ExitStack() as opened:
        previous = read_info(path) if path.exists() else None
        rows = [_open(opened, folder, settings) for folder in work.indexed()]
        unreadable = opened.enter_context(UnreadableFile(work.unreadable))
        listed = _list(collection, work, rows, unreadable)
        with RowWriter(work.new_part(), dim=settings.dim) as part:
            items = read_items(work.missing)
            with closing(encoder.batches(collection, items, options)) as batches:
                _write(batches, part, unreadable, lambda done: computing(done, listed.missing))
        unreadable.flush()
        _check(collection, listed.reused + part.count, unreadable, strict=options.strict)
        num_items = listed.reused + part.count
        with_index = _with_index(encoder.bundle, num_items, options)
        if previous is None or not _is_current(
            previous, listed, part.count, work, settings, with_index=with_index
        ):
            rows.append(_open(opened, part.path, settings))
            build = _index_builder(encoder.bundle) if with_index else None
            info = assemble(work, settings, rows, num_items, unreadable.count, writing, build)
            work.publish()
        else:
            info = previous
    dropped = previous.num_items - listed.in_gallery if previous is not None else 0
    return IndexResult(
        info, part.count, listed.reused, dropped, collection.ignored, tuple(unreadable.first)
    )


def _settings(bundle: Bundle, collection: Collection, options: IndexOptions) -> GallerySettings:
    return GallerySettings(
        reads=bundle.spec.reads,
        backbone=features_identity(bundle),
        dim=bundle.spec.dim,
        thumbnails=options.thumbnails and bundle.spec.reads == "images",
        source=shown_name(str(collection.path.resolve())),
    )


def _with_index(bundle: Bundle, num_items: int, options: IndexOptions) -> bool:
    if options.index is None:
        return num_items > LEAST_ITEMS and supports_index(bundle)
    return options.index


def _index_builder(bundle: Bundle) -> Callable[[np.ndarray, Path], IndexInfo]:
    return partial(
        build_index, classes_Qd=sample_classes(bundle), normalizes=bundle.spec.logits.normalizes
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


def _write(
    batches: Iterable[Batch],
    part: RowWriter,
    unreadable: UnreadableFile,
    report: Callable[[int], None],
) -> None:
    """Append the rows of the batches to `part` in order."""
    done, committed = 0, time.monotonic()
    report(0)
    for batch in batches:
        for one in batch:
            if isinstance(one, Row):
                part.append(*one)
            else:
                unreadable.add(one)
        done += len(batch)
        if time.monotonic() - committed >= _SECONDS_BETWEEN_COMMITS:
            part.commit()
            committed = time.monotonic()
        report(done)


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
    *,
    with_index: bool,
) -> bool:
    """Return whether the gallery is up to date: no item is new, removed or changed, and it has an
    index if it should have one."""
    same_items = computed == 0 and listed.in_gallery == listed.reused == previous.num_items
    sha256 = hashlib.sha256(work.unreadable.read_bytes()).hexdigest()
    return (
        same_items
        and with_index == (previous.index is not None)
        and sha256 == previous.files[UNREADABLE].sha256
        and GallerySettings.of(previous) == settings
    )
