"""Search galleries for the items with the highest scores for a class."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from heads.logits import ClassRows, LogitMap
from heads.losses import score as score_of
from serving.answer import NOT_ALIGNED, Query, threshold_of, verdict
from serving.galleries.gallery import Gallery, shown_name
from serving.schemas import ClassHits, GalleryHit, Hits
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import LossSpec


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

    def search(self, name: str, query: Query, *, offset: int, limit: int) -> Hits:
        """Search the gallery `name`. For each class of `query`, return up to `limit` of its items
        in descending order of score, starting at rank `offset`. If a threshold is set, return only
        the items that reach it."""
        gallery, loss = self.available[name], self._bundle.spec.loss
        return Hits(
            version=self._bundle.version,
            aligned=loss.aligned,
            notice=None if loss.aligned else NOT_ALIGNED.format(kind=loss.kind),
            num_items=gallery.num_items,
            results=[
                self._class_hits(gallery, class_id, query, offset, limit)
                for class_id in query.class_ids
            ],
        )

    def _class_hits(
        self, gallery: Gallery, class_id: int, query: Query, offset: int, limit: int
    ) -> ClassHits:
        row, spec = self._bundle.rows([class_id]), self._bundle.spec
        norms = gallery.inverse_norms if spec.logits.normalizes else None
        scores = class_scores(gallery.features, row, spec.logits, spec.loss, norms)
        decided, matches = threshold_of(self._bundle, class_id, query), None
        total = len(scores)
        if decided.reason is not None:  # a hit would look like a match
            total = 0
        elif decided.threshold is not None:
            total = matches = int(np.count_nonzero(scores >= np.float64(decided.threshold)))
        hits = []
        for index in best(scores, offset, min(offset + limit, total)).tolist():
            item = gallery.item(index)
            hits.append(
                GalleryHit(
                    id=gallery.id_of(index),
                    item=index,
                    name=shown_name(item.name),
                    text=item.text,
                    **dict(verdict(decided, float(scores[index]))),
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
