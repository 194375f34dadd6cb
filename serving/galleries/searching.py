"""Search galleries for the items with the highest scores for a class."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from heads.logit_maps import ClassRows, LogitMap
from heads.losses import score as score_of
from serving.answer import NOT_ALIGNED, Query, threshold_of, verdict
from serving.galleries.gallery import Gallery, OtherBackboneError, shown_name
from serving.galleries.index import MAX_HITS, ApproximateIndex
from serving.schemas import ClassHits, GalleryHit, Hits
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import LossSpec


class Page(NamedTuple):
    """Which hits to return, and whether the search must be exact (None: if the recall of the index
    is too low or unknown)."""

    offset: int
    limit: int
    exact: bool | None = None


def supports_index(bundle: Bundle) -> bool:
    """Return whether the items with the largest products have the highest scores."""
    return bundle.spec.loss.score == "logit"


class Galleries:
    """The galleries of a server by name: those that are `available`, and those that cannot be
    searched with this bundle, and why. Searches are thread-safe."""

    def __init__(self, folders: Mapping[str, Path], bundle: Bundle) -> None:
        self._bundle = bundle
        self.available: dict[str, Gallery] = {}
        self.unavailable: dict[str, OSError | ValueError] = {}
        for name, path in folders.items():
            try:
                self.available[name] = Gallery(path, bundle)
            except (OSError, ValueError) as error:
                self.unavailable[name] = error

    def verify(self, previous: "Galleries", *, is_new: bool) -> bool:
        """Verify the checksums of the galleries that differ from those of `previous`. Return
        whether there are any. Raises OSError or ValueError for a damaged gallery. A gallery of
        another backbone is an error unless `is_new`, which states that the bundle differs, too."""
        for name in previous.available.keys() & self.unavailable.keys():
            error = self.unavailable[name]
            if not (is_new and isinstance(error, OtherBackboneError)):
                raise error
        changed = [
            gallery
            for name, gallery in self.available.items()
            if name not in previous.available or gallery.info != previous.available[name].info
        ]
        for gallery in changed:
            gallery.verify()
        return bool(changed)

    def search(self, name: str, query: Query, page: Page) -> Hits:
        """Search the gallery `name`. For each class of `query`, return one page of its items in
        descending order of score. If a threshold is set, return only the items that reach it."""
        gallery, loss = self.available[name], self._bundle.spec.loss
        index, info = None, gallery.info.index
        if info is not None and not page.exact and supports_index(self._bundle):
            is_default = info.is_default and page.offset + page.limit <= MAX_HITS
            index = gallery.index if is_default or page.exact is False else None
        return Hits(
            version=self._bundle.version,
            aligned=loss.aligned,
            notice=None if loss.aligned else NOT_ALIGNED.format(kind=loss.kind),
            num_items=gallery.num_items,
            exact=index is None,
            results=[
                self._class_hits(gallery, index, class_id, query, page)
                for class_id in query.class_ids
            ],
        )

    def _class_hits(
        self,
        gallery: Gallery,
        index: ApproximateIndex | None,
        class_id: int,
        query: Query,
        page: Page,
    ) -> ClassHits:
        row, spec = self._bundle.rows([class_id]), self._bundle.spec
        if index is None:
            norms = gallery.inverse_norms if spec.logits.normalizes else None
            scores = class_scores(gallery.features, row, spec.logits, spec.loss, norms)
            items, total = np.arange(len(scores)), len(scores)
        else:
            items = index.candidates(row.rows[0].numpy())
            scores = class_scores(gallery.features[items], row, spec.logits, spec.loss)
            total = min(len(scores), MAX_HITS)
        decided, matches = threshold_of(self._bundle, class_id, query), None
        if decided.reason is not None:  # a hit would look like a match
            total = 0
        elif decided.threshold is not None:
            reaching = np.count_nonzero(scores >= np.float64(decided.threshold))
            total = min(total, int(reaching))
            matches = total if index is None else None
        hits = []
        for rank in best(scores, page.offset, min(page.offset + page.limit, total)).tolist():
            position = int(items[rank])
            item = gallery.item(position)
            hits.append(
                GalleryHit(
                    id=gallery.id_of(position),
                    item=position,
                    name=shown_name(item.name),
                    text=item.text,
                    **dict(verdict(decided, float(scores[rank]))),
                )
            )
        return ClassHits(**dict(decided), total=total, matches=matches, hits=hits)


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


def best(scores: np.ndarray, start: int, end: int) -> np.ndarray:
    """Return the indices of the scores with ranks `start` to `end` - 1, int64, in descending order
    of score, with ties in ascending order of index.

    Partitions in O(n), then sorts only the scores between those of the first and the last rank.
    """
    num = len(scores)
    end = min(end, num)
    if start >= end:
        return np.empty(0, np.int64)
    bounds = num - end, num - 1 - start
    low, high = np.partition(scores, bounds)[list(bounds)]
    between = np.flatnonzero((scores >= low) & (scores <= high))
    order = between[np.argsort(-scores[between], kind="stable")]
    num_above = np.count_nonzero(scores > high)
    return order[start - num_above : end - num_above]
