"""Search galleries for the items with the highest scores for a class."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch

from heads.logits import ClassRows, LogitMap
from heads.losses import score as score_of
from serving.answer import NOT_ALIGNED, Query, threshold_of, verdict
from serving.galleries.format import shown_name
from serving.galleries.gallery import Gallery
from serving.galleries.index import MAX_HITS, ApproximateIndex, supports_index
from serving.schemas import ClassHits, GalleryHit, Hits
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import LossSpec

_FIRST_PAGE = 1024
_CACHE_BYTES = 256 * 2**20


class Page(NamedTuple):
    """Which hits to return, and whether the search must be exact (None: if the recall of the index
    is too low or unknown)."""

    offset: int
    limit: int
    exact: bool | None = None


class Galleries:
    """The galleries of a server, by name. Searches are thread-safe.

    `unavailable` has the galleries that cannot be searched with this bundle, and why.
    """

    def __init__(
        self, folders: Mapping[str, Path], bundle: Bundle, *, cache_bytes: int = _CACHE_BYTES
    ) -> None:
        self._bundle = bundle
        self._by_name: dict[str, Gallery] = {}
        self.unavailable: dict[str, OSError | ValueError] = {}
        for name, path in folders.items():
            try:
                self._by_name[name] = Gallery(path, bundle)
            except (OSError, ValueError) as error:
                self.unavailable[name] = error
        self._rankings = Rankings(cache_bytes)

    def names(self) -> list[str]:
        """The names of all galleries, also of those that are unavailable."""
        return sorted({*self._by_name, *self.unavailable})

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Gallery:
        """Return the gallery `name`. Raises KeyError if it does not exist or is unavailable."""
        return self._by_name[name]

    def search(self, name: str, query: Query, page: Page) -> Hits:
        """Search the gallery `name`. For each class of `query`, return one page of its items in
        descending order of score. If a threshold is set, return only the items that reach it."""
        gallery, loss = self[name], self._bundle.spec.loss
        index = self._index(gallery, page)
        return Hits(
            version=self._bundle.version,
            aligned=loss.aligned,
            notice=None if loss.aligned else NOT_ALIGNED.format(kind=loss.kind),
            num_items=gallery.num_items,
            exact=index is None,
            results=[
                self._class_hits(name, index, class_id, query, page) for class_id in query.class_ids
            ],
        )

    def _index(self, gallery: Gallery, page: Page) -> ApproximateIndex | None:
        info = gallery.info.index
        if info is None or page.exact or not supports_index(self._bundle):
            return None
        is_default = info.is_default and page.offset + page.limit <= MAX_HITS
        return gallery.index if is_default or page.exact is False else None

    def _class_hits(
        self, name: str, index: ApproximateIndex | None, class_id: int, query: Query, page: Page
    ) -> ClassHits:
        gallery = self[name]
        decided = threshold_of(self._bundle, class_id, query)
        ranking = self._ranking(name, index, class_id)
        total, matches = ranking.total, None
        if decided.threshold is not None:
            total = ranking.count_reaching(decided.threshold)
            matches = total if index is None else None
        hits = []
        for position, score in ranking.page(
            page.offset, min(page.limit, max(0, total - page.offset))
        ):
            item = gallery.item(position)
            hits.append(
                GalleryHit(
                    id=gallery.id_of(position),
                    item=position,
                    name=shown_name(item.name),
                    text=item.text,
                    **dict(verdict(decided, score)),
                )
            )
        return ClassHits(**dict(decided), total=total, matches=matches, hits=hits)

    def _ranking(self, name: str, index: ApproximateIndex | None, class_id: int) -> "Ranking":
        key = (name, class_id, index is None)
        ranking = self._rankings.get(key)
        if ranking is None:
            ranking = self._scored(self[name], index, class_id)
            self._rankings.put(key, ranking)
        return ranking

    def _scored(self, gallery: Gallery, index: ApproximateIndex | None, class_id: int) -> "Ranking":
        """Score all items, or the candidates that the index finds."""
        row, spec = self._bundle.rows([class_id]), self._bundle.spec
        if index is None:
            norms = gallery.inverse_norms if spec.logits.normalizes else None
            return Ranking(class_scores(gallery.features, row, spec.logits, spec.loss, norms))
        found = index.candidates(row.rows[0].numpy())
        scores = class_scores(gallery.features[found], row, spec.logits, spec.loss)
        return Ranking(scores, found, min(len(found), MAX_HITS))


def class_scores(
    features: np.ndarray,
    row: ClassRows,
    logits: LogitMap,
    loss: LossSpec,
    inverse_norms: np.ndarray | None = None,
) -> np.ndarray:
    """Compute the scores of N items for one class, float32 [N]. The features [N, dim] may be
    memory-mapped and larger than memory. For cosines, `inverse_norms` [N] saves a pass over
    them."""
    values = torch.from_numpy(logits.of_one_class(features, row, inverse_norms))
    return score_of(loss.score, values, eps=loss.eps).numpy()


class Ranking:
    """Items ordered by score, sorted only as far as pages have been requested.

    `scores` are those of `positions`, or of the items 0, 1, 2, … if `positions` is None. Only the
    first `total` items are part of the ranking.
    """

    def __init__(
        self, scores: np.ndarray, positions: np.ndarray | None = None, total: int | None = None
    ) -> None:
        self.scores, self._positions = scores, positions
        self.total = len(scores) if total is None else total
        self._best = best(scores, min(_FIRST_PAGE, self.total))

    @property
    def nbytes(self) -> int:
        positions = 0 if self._positions is None else self._positions.nbytes
        return self.scores.nbytes + self._best.nbytes + positions

    def count_reaching(self, threshold: float) -> int:
        """Return the number of items with a score of at least `threshold`."""
        reaching = int(np.count_nonzero(self.scores >= np.float64(threshold)))
        return min(self.total, reaching)

    def page(self, offset: int, limit: int) -> list[tuple[int, float]]:
        """Return the positions and scores of items in descending order of score, with ties in the
        order of the items."""
        end = min(offset + limit, self.total)
        order = self._best  # another thread may replace it with a longer one
        if end > len(order):
            # Sort twice as many items as needed, so that reading all pages takes only O(log n)
            # sorts.
            self._best = order = best(self.scores, min(2 * end, self.total))
        found = order[offset:end]
        positions = found if self._positions is None else self._positions[found]
        return list(zip(positions.tolist(), self.scores[found].tolist(), strict=True))


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` highest scores, int64, in descending order of score, with
    ties in ascending order of index.

    Partitions in O(n), then sorts only the items above the `count`-th score.
    """
    num = len(scores)
    if not count:
        return np.empty(0, np.int64)
    if count >= num:
        return np.argsort(-scores, kind="stable")
    last = np.partition(scores, num - count)[num - count]
    above = np.flatnonzero(scores > last)
    ties = np.flatnonzero(scores == last)[: count - len(above)]
    return np.concatenate([above[np.argsort(-scores[above], kind="stable")], ties])


class Rankings:
    """An LRU cache of rankings with a size limit in bytes. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._lock = max_bytes, Lock()
        self._rankings: OrderedDict[Hashable, Ranking] = OrderedDict()

    def get(self, key: Hashable) -> Ranking | None:
        with self._lock:
            if key in self._rankings:
                self._rankings.move_to_end(key)
            return self._rankings.get(key)

    def put(self, key: Hashable, ranking: Ranking) -> None:
        with self._lock:
            self._rankings[key] = ranking
            while sum(one.nbytes for one in self._rankings.values()) > self._max_bytes:
                self._rankings.popitem(last=False)

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate over the keys, the least recently used first."""
        return iter(self._rankings)
