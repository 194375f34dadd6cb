"""Questions to galleries: of each class the items that it scores highest, a page of them.

The scores of classes that were asked about lately are kept, so that a next page costs no product.
"""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from threading import Lock

from serving.answer import NOT_ALIGNED, Question, threshold_of, verdict
from serving.galleries.gallery import Gallery
from serving.galleries.items import shown_name
from serving.galleries.ranking import Ranking, class_scores
from serving.galleries.schemas import ClassHits, Hit, Hits
from trainer.bundle.bundle import Bundle

_CACHE_BYTES = 256 * 2**20


class Galleries:
    """The galleries of one server by their names. Searched by any number of threads."""

    def __init__(
        self, folders: Mapping[str, Path], bundle: Bundle, *, cache_bytes: int = _CACHE_BYTES
    ) -> None:
        """Raises what `Gallery` raises for the first folder that is none of this bundle's."""
        self._bundle = bundle
        self._by_name = {name: Gallery(path, bundle) for name, path in folders.items()}
        self._rankings = _Rankings(cache_bytes)

    def names(self) -> list[str]:
        return sorted(self._by_name)

    def __getitem__(self, name: str) -> Gallery:
        """Raises KeyError."""
        return self._by_name[name]

    def search(self, name: str, question: Question, *, offset: int, limit: int) -> Hits:
        """Of each class of `question` items `offset` … `offset + limit` of the gallery `name`, from
        the highest score on; with a threshold only those that reach it."""
        loss = self._bundle.spec.loss
        return Hits(
            aligned=loss.aligned,
            notice=None if loss.aligned else NOT_ALIGNED.format(kind=loss.kind),
            num_items=self[name].num_items,
            results=[
                self._class_hits(name, class_id, question, offset, limit)
                for class_id in question.class_ids
            ],
        )

    def _class_hits(
        self, name: str, class_id: int, question: Question, offset: int, limit: int
    ) -> ClassHits:
        ranking = self._ranking(name, class_id)
        decided = threshold_of(self._bundle, class_id, question)
        bar = decided.threshold
        matches = None if bar is None else ranking.reaching(bar)
        total = self[name].num_items if matches is None else matches
        hits = []
        for place in ranking.page(offset, min(limit, max(0, total - offset))):
            item = self[name].item(place)
            found = dict(verdict(decided, float(ranking.scores[place])))
            hits.append(Hit(**found, item=place, name=shown_name(item.name), text=item.text))
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
    """The rankings that were used last, of at most so many bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._lock = max_bytes, Lock()
        self._held: OrderedDict[tuple[str, int], Ranking] = OrderedDict()

    def get(self, key: tuple[str, int]) -> Ranking | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: tuple[str, int], ranking: Ranking) -> None:
        with self._lock:
            self._held[key] = ranking
            while sum(held.nbytes for held in self._held.values()) > self._max_bytes:
                self._held.popitem(last=False)
