"""Open galleries and search them for the items with the highest scores for a class.

Features are memory-mapped; items and thumbnails are read by index. The scores of recently searched
classes are cached, so reading the next page does not require a matrix product.
"""

import hashlib
import os
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from heads.logits import ClassRows, LogitMap
from heads.losses import score
from serving.answer import NOT_ALIGNED, Query, threshold_of, verdict
from serving.galleries.format import (
    DAMAGE_REMEDY,
    FEATURES,
    ITEMS,
    OFFSETS,
    THUMBNAILS,
    Item,
    check_same_backbone,
    parse_item,
    read_info,
    shown_name,
)
from serving.galleries.rows import map_matrix
from serving.schemas import ClassHits, GalleryHit, Hits
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import LossSpec

_CACHE_BYTES = 256 * 2**20
_FIRST_PAGE = 1024


class Gallery:
    """An open gallery. Thread-safe. It continues to use its original files if the folder is
    replaced."""

    def __init__(self, path: Path, bundle: Bundle) -> None:
        """Raises FileNotFoundError if the gallery or one of its files is missing, and ValueError if
        it is damaged, has a newer format or contains features from a different backbone."""
        self.path, self.info = path, read_info(path)
        check_same_backbone(path, self.info, bundle)
        self.num_items = self.info.num_items
        self.features = map_matrix(path / FEATURES, "<f4", (self.num_items, self.info.dim))
        self._ends = map_matrix(path / OFFSETS, "<u8", (self.num_items + 1, 2))
        self._lines, self._thumbnails = (self._open(name) for name in (ITEMS, THUMBNAILS))

    def verify(self) -> None:
        """Verify the checksums of all files. Raises ValueError at the first mismatch."""
        for name, expected in self.info.files.items():
            with (self.path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                    raise ValueError(
                        f"{self.path / name} does not match its checksum: {DAMAGE_REMEDY}"
                    )

    def item(self, index: int) -> Item:
        """Return an item. Raises IndexError if the index is out of range."""
        return parse_item(self._read(ITEMS, self._lines, index, 0))

    def thumbnail(self, index: int) -> bytes:
        """Return the item's thumbnail as a JPEG, or empty bytes if the gallery has no thumbnails.
        Raises IndexError like `item`."""
        return self._read(THUMBNAILS, self._thumbnails, index, 1)

    def _open(self, name: str) -> int:
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _read(self, name: str, descriptor: int, index: int, column: int) -> bytes:
        if not 0 <= index < self.num_items:
            raise IndexError(
                f"item {index} is out of range: the gallery contains items 0 to "
                f"{self.num_items - 1}"
            )
        begin, end = (int(offset) for offset in self._ends[index : index + 2, column])
        if not begin <= end <= self.info.files[name].bytes:
            raise ValueError(f"{self.path / OFFSETS} is damaged at item {index}: {DAMAGE_REMEDY}")
        return os.pread(descriptor, end - begin, begin)


def class_scores(
    features: np.ndarray, row: ClassRows, logits: LogitMap, loss: LossSpec
) -> np.ndarray:
    """Compute the scores of N items for one class, float32 [N]. The features [N, dim] may be
    memory-mapped and larger than memory."""
    values = torch.from_numpy(logits.of_one_class(features, row))
    return score(loss.score, values, eps=loss.eps).numpy()


class Ranking:
    """The scores of all items for one class, sorted only as far as pages have been requested."""

    def __init__(self, scores: np.ndarray) -> None:
        self.scores = scores
        self._best = best(scores, _FIRST_PAGE)

    @property
    def nbytes(self) -> int:
        return self.scores.nbytes + self._best.nbytes

    def count_reaching(self, threshold: float) -> int:
        """Return the number of items with a score of at least `threshold`."""
        return int(np.count_nonzero(self.scores >= np.float64(threshold)))

    def page(self, offset: int, limit: int) -> list[int]:
        """Return item indices in descending order of score, with ties in the order of the items."""
        end = min(offset + limit, len(self.scores))
        order = self._best  # another thread may replace it with a longer one
        if end > len(order):
            # Sort twice as many items as needed, so that reading all pages takes only O(log n)
            # sorts.
            self._best = order = best(self.scores, 2 * end)
        return order[offset:end].tolist()


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` highest scores, int64, in descending order of score, with
    ties in ascending order of index.

    Partitions in O(n), then sorts only the items above the `count`-th score.
    """
    num = len(scores)
    if count >= num:
        return np.argsort(-scores, kind="stable")
    last = np.partition(scores, num - count)[num - count]
    above = np.flatnonzero(scores > last)
    ties = np.flatnonzero(scores == last)[: count - len(above)]
    return np.concatenate([above[np.argsort(-scores[above], kind="stable")], ties])


class Galleries:
    """The galleries of a server, by name. Thread-safe."""

    def __init__(
        self, folders: Mapping[str, Path], bundle: Bundle, *, cache_bytes: int = _CACHE_BYTES
    ) -> None:
        """Raises the same exceptions as `Gallery` for the first folder that is not a gallery of
        this bundle."""
        self._bundle = bundle
        self._by_name = {name: Gallery(path, bundle) for name, path in folders.items()}
        self._rankings = _Rankings(cache_bytes)

    def names(self) -> list[str]:
        return sorted(self._by_name)

    def __getitem__(self, name: str) -> Gallery:
        """Return the gallery `name`. Raises KeyError if it does not exist."""
        return self._by_name[name]

    def search(self, name: str, query: Query, *, offset: int, limit: int) -> Hits:
        """Search the gallery `name`. For each class of `query`, return up to `limit` items,
        starting at `offset`, in descending order of score. If a threshold is set, return only the
        items that reach it."""
        loss = self._bundle.spec.loss
        return Hits(
            version=self._bundle.version,
            aligned=loss.aligned,
            notice=None if loss.aligned else NOT_ALIGNED.format(kind=loss.kind),
            num_items=self[name].num_items,
            results=[
                self._class_hits(name, class_id, query, offset, limit)
                for class_id in query.class_ids
            ],
        )

    def _class_hits(
        self, name: str, class_id: int, query: Query, offset: int, limit: int
    ) -> ClassHits:
        ranking = self._ranking(name, class_id)
        decided = threshold_of(self._bundle, class_id, query)
        threshold = decided.threshold
        matches = None if threshold is None else ranking.count_reaching(threshold)
        total = self[name].num_items if matches is None else matches
        hits = []
        for index in ranking.page(offset, min(limit, max(0, total - offset))):
            item = self[name].item(index)
            fields = dict(verdict(decided, float(ranking.scores[index])))
            hits.append(
                GalleryHit(**fields, item=index, name=shown_name(item.name), text=item.text)
            )
        return ClassHits(**dict(decided), total=total, matches=matches, hits=hits)

    def _ranking(self, name: str, class_id: int) -> Ranking:
        ranking = self._rankings.get((name, class_id))
        if ranking is None:
            row, spec = self._bundle.rows([class_id]), self._bundle.spec
            scores = class_scores(self[name].features, row, spec.logits, spec.loss)
            ranking = Ranking(scores)
            self._rankings.put((name, class_id), ranking)
        return ranking


class _Rankings:
    """An LRU cache of rankings with a size limit in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._lock = max_bytes, Lock()
        self._rankings: OrderedDict[tuple[str, int], Ranking] = OrderedDict()

    def get(self, key: tuple[str, int]) -> Ranking | None:
        with self._lock:
            if key in self._rankings:
                self._rankings.move_to_end(key)
            return self._rankings.get(key)

    def put(self, key: tuple[str, int], ranking: Ranking) -> None:
        with self._lock:
            self._rankings[key] = ranking
            while sum(one.nbytes for one in self._rankings.values()) > self._max_bytes:
                self._rankings.popitem(last=False)
