"""Search galleries for the items with the highest scores for a class, or for the items that are
similar to one of their items."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from heads.logits import ClassRows, Cosine, LogitMap, unit_vectors
from serving.answer import NOT_ALIGNED, Query, threshold_of, verdict
from serving.galleries.changes import GalleryChanges
from serving.galleries.gallery import Gallery
from serving.galleries.index import MAX_HITS, ApproximateIndex, supports_index
from serving.galleries.live import LiveGallery, Snapshot
from serving.galleries.ranking import Ranking, Rankings, class_scores
from serving.schemas import ClassHits, ExampleHit, ExampleHits, GalleryHit, Hits
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import LossSpec

_CACHE_BYTES = 256 * 2**20


class Page(NamedTuple):
    """Which hits to return, and whether the search must be exact (None: if the recall of the index
    is too low or unknown)."""

    offset: int
    limit: int
    exact: bool | None = None


@dataclass(frozen=True)
class _Target:
    """What the items are compared with: the weights of a class or the features of an item."""

    key: Hashable
    row: ClassRows
    logits: LogitMap
    loss: LossSpec

    @classmethod
    def of_example(cls, item_id: str, features: np.ndarray) -> "_Target":
        row = ClassRows(torch.tensor([0]), unit_vectors(torch.from_numpy(features)[None]))
        return cls(item_id, row, Cosine(scale=1.0), LossSpec(kind="cosine", aligned=True))

    def scores(self, features: np.ndarray, inverse_norms: np.ndarray | None = None) -> np.ndarray:
        return class_scores(features, self.row, self.logits, self.loss, inverse_norms)

    def scores_of_gallery(self, gallery: Gallery) -> np.ndarray:
        return self.scores(
            gallery.features, gallery.inverse_norms if self.logits.normalizes else None
        )


class Galleries:
    """The galleries of a server, by name. Searches are thread-safe."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        bundle: Bundle,
        changes: GalleryChanges,
        *,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        """Raises the same exceptions as `Gallery` for the first folder that is not a gallery of
        this bundle."""
        self._bundle = bundle
        self._by_name = {}
        for name, path in folders.items():
            base = Gallery(path, bundle)
            key = f"{name}@{base.info.backbone[:16]}"
            self._by_name[name] = LiveGallery(base, changes, key)
        self._rankings = Rankings(cache_bytes)

    def names(self) -> list[str]:
        return sorted(self._by_name)

    def __getitem__(self, name: str) -> LiveGallery:
        """Return the gallery `name`. Raises KeyError if it does not exist."""
        return self._by_name[name]

    def search(self, name: str, query: Query, page: Page) -> Hits:
        """Search the last known version of the gallery `name`. For each class of `query`, return
        one page of its items in descending order of score. If a threshold is set, return only the
        items that reach it."""
        snapshot, loss = self[name].snapshot, self._bundle.spec.loss
        index = self._index(snapshot, page)
        return Hits(
            version=self._bundle.version,
            aligned=loss.aligned,
            notice=None if loss.aligned else NOT_ALIGNED.format(kind=loss.kind),
            num_items=snapshot.num_items,
            exact=index is None,
            results=[
                self._class_hits(name, snapshot, index, class_id, query, page)
                for class_id in query.class_ids
            ],
        )

    def search_similar(
        self, name: str, examples: Sequence[str], threshold: float | None, page: Page
    ) -> Hits:
        """Like `search`, for the items whose features have the largest cosines with those of each
        example, an id of an item. Raises UnknownItemError."""
        snapshot = self[name].snapshot
        targets = [
            _Target.of_example(one, snapshot.features_of(snapshot.position(one)))
            for one in examples
        ]
        index = self._index(snapshot, page)
        # Only unit vectors have the same order by product and by cosine.
        index = index if index is not None and index.is_normalized else None
        return Hits(
            version=self._bundle.version,
            aligned=True,
            notice=None,
            num_items=snapshot.num_items,
            exact=index is None,
            results=[],
            examples=[
                self._example_hits(name, snapshot, index, target, threshold, page)
                for target in targets
            ],
        )

    def _index(self, snapshot: Snapshot, page: Page) -> ApproximateIndex | None:
        info = snapshot.base.info.index
        if info is None or page.exact or not supports_index(self._bundle):
            return None
        is_default = info.is_default and page.offset + page.limit <= MAX_HITS
        return snapshot.base.index if is_default or page.exact is False else None

    def _class_hits(
        self,
        name: str,
        snapshot: Snapshot,
        index: ApproximateIndex | None,
        class_id: int,
        query: Query,
        page: Page,
    ) -> ClassHits:
        row, spec = self._bundle.rows([class_id]), self._bundle.spec
        target = _Target(class_id, row, spec.logits, spec.loss)
        decided = threshold_of(self._bundle, class_id, query)
        ranking = self._ranking(name, snapshot, index, target)
        total, matches = _counts(ranking, decided.threshold, index)
        hits = [
            GalleryHit(**snapshot.show(position)._asdict(), **dict(verdict(decided, score)))
            for position, score in _page(ranking, page, total)
        ]
        return ClassHits(**dict(decided), total=total, matches=matches, hits=hits)

    def _example_hits(
        self,
        name: str,
        snapshot: Snapshot,
        index: ApproximateIndex | None,
        target: _Target,
        threshold: float | None,
        page: Page,
    ) -> ExampleHits:
        ranking = self._ranking(name, snapshot, index, target)
        total, matches = _counts(ranking, threshold, index)
        hits = [
            ExampleHit(
                **snapshot.show(position)._asdict(),
                score=score,
                match=None if threshold is None else score >= threshold,
            )
            for position, score in _page(ranking, page, total)
        ]
        return ExampleHits(
            example=str(target.key), threshold=threshold, total=total, matches=matches, hits=hits
        )

    def _ranking(
        self, name: str, snapshot: Snapshot, index: ApproximateIndex | None, target: _Target
    ) -> Ranking:
        key = (name, target.key, snapshot.version, index is None)
        ranking = self._rankings.get(key)
        if ranking is None:
            if index is None:
                ranking = _exact_ranking(snapshot, target)
            else:
                ranking = _approximate_ranking(snapshot, index, target)
            self._rankings.put(key, ranking)
        return ranking


def _page(ranking: Ranking, page: Page, total: int) -> list[tuple[int, float]]:
    return ranking.page(page.offset, min(page.limit, max(0, total - page.offset)))


def _counts(
    ranking: Ranking, threshold: float | None, index: ApproximateIndex | None
) -> tuple[int, int | None]:
    """Return the number of hits on all pages and the number of matches, if it is known."""
    if threshold is None:
        return ranking.total, None
    matches = ranking.count_reaching(threshold)
    return matches, matches if index is None else None


def _exact_ranking(snapshot: Snapshot, target: _Target) -> Ranking:
    scores = target.scores_of_gallery(snapshot.base)
    scores[snapshot.deleted_positions()] = -np.inf
    if snapshot.inserted:
        scores = np.concatenate([scores, target.scores(snapshot.features)])
    return Ranking(scores, total=snapshot.num_items)


def _approximate_ranking(snapshot: Snapshot, index: ApproximateIndex, target: _Target) -> Ranking:
    found = index.candidates(target.row.rows[0].numpy())
    if snapshot.deleted:
        found = np.setdiff1d(found, snapshot.deleted_positions(), assume_unique=True)
    scores = target.scores(snapshot.base.features[found])
    if snapshot.inserted:
        first = snapshot.base.num_items
        found = np.concatenate([found, np.arange(first, first + len(snapshot.inserted))])
        scores = np.concatenate([scores, target.scores(snapshot.features)])
    return Ranking(scores, found, min(len(found), MAX_HITS))
