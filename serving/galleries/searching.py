"""Search galleries for the items with the highest scores for a class."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from serving.answer import NOT_ALIGNED, Query, threshold_of, verdict
from serving.galleries.format import shown_name
from serving.galleries.gallery import Gallery
from serving.galleries.index import MAX_HITS, ApproximateIndex, supports_index
from serving.galleries.ranking import Ranking, Rankings, class_scores
from serving.schemas import ClassHits, GalleryHit, Hits
from trainer.bundle.bundle import Bundle

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

    def _ranking(self, name: str, index: ApproximateIndex | None, class_id: int) -> Ranking:
        key = (name, class_id, index is None)
        ranking = self._rankings.get(key)
        if ranking is None:
            ranking = self._scored(self[name], index, class_id)
            self._rankings.put(key, ranking)
        return ranking

    def _scored(self, gallery: Gallery, index: ApproximateIndex | None, class_id: int) -> Ranking:
        """Score all items, or the candidates that the index finds."""
        row, spec = self._bundle.rows([class_id]), self._bundle.spec
        if index is None:
            norms = gallery.inverse_norms if spec.logits.normalizes else None
            return Ranking(class_scores(gallery.features, row, spec.logits, spec.loss, norms))
        found = index.candidates(row.rows[0].numpy())
        scores = class_scores(gallery.features[found], row, spec.logits, spec.loss)
        return Ranking(scores, found, min(len(found), MAX_HITS))
