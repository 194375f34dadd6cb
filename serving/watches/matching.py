"""Evaluate all watches of a feed with one matrix product over the weights of all their classes."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.answer import Query, threshold_of
from serving.watches.live import LiveWatches
from serving.watches.watch import Terms, Watch
from trainer.bundle.bundle import Bundle

# Criteria of removed watches that are kept in addition to those of as many watches as exist.
_SPARE_ENTRIES = 100
# From a class name and a recall to the id and the threshold of the class.
_Found = dict[tuple[str, float | None], tuple[int, float | None]]
_log = logging.getLogger("kway.serving")


@dataclass(frozen=True)
class Criterion:
    """A class of a watch and its threshold."""

    class_id: int
    threshold: float


@dataclass(frozen=True)
class Match:
    """A frame matches this class of a watch."""

    watch: Watch
    class_id: int
    score: float
    threshold: float


class Criteria:
    """The criteria of all watches of a replica, computed once per watch."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._cache: dict[str, tuple[Watch, list[tuple[Watch, Criterion]]]] = {}

    def of(self, watches: Iterable[Watch], existing: LiveWatches) -> list[tuple[Watch, Criterion]]:
        """Return each watch once for each of its classes, paired with the criterion. Classes
        without a threshold in this model, which occur if the watch was created for another model,
        are logged and omitted.

        `existing` contains all watches, including those of other feeds. The criteria of removed
        watches are deleted once there are more of them than watches."""
        if len(self._cache) > 2 * len(existing) + _SPARE_ENTRIES:
            self._cache = {one: self._cache[one] for one in self._cache if one in existing}
        pairs, found = [], _Found()
        for watch in watches:
            known = self._cache.get(watch.id)
            # A watch that has not changed is the same object.
            if known is None or known[0] is not watch:
                known = watch, [(watch, one) for one in self._renewed(watch, known, found)]
            self._cache[watch.id] = known
            pairs += known[1]
        return pairs

    def _renewed(
        self,
        watch: Watch,
        known: tuple[Watch, list[tuple[Watch, Criterion]]] | None,
        found: _Found,
    ) -> list[Criterion]:
        if known is not None and _query_of(known[0]) == _query_of(watch):
            return [criterion for _, criterion in known[1]]
        return self._criteria(watch.id, watch, found)

    def _criteria(self, watch_id: str, terms: Terms, found: _Found) -> list[Criterion]:
        criteria = []
        for name in terms.classes:
            try:
                class_id, threshold = self._find(name, terms.recall, found)
            except ValueError as error:
                _log.warning("watch %s ignores class %r: %s", watch_id, name, error)
                continue
            threshold = terms.threshold if terms.recall is None else threshold
            if threshold is None:
                _log.warning("watch %s ignores class %r, which has no threshold", watch_id, name)
                continue
            criteria.append(Criterion(class_id, threshold))
        return criteria

    def _find(self, name: str, recall: float | None, found: _Found) -> tuple[int, float | None]:
        """Return the id of a class and its threshold for a recall, which takes 50 us unless it is
        in `found`."""
        if (name, recall) not in found:
            class_id = self._bundle.names.id_of_name(name)
            query = Query((class_id,), recall, None)
            found[name, recall] = class_id, threshold_of(self._bundle, class_id, query).threshold
        return found[name, recall]


def _query_of(terms: Terms) -> tuple[tuple[str, ...], float | None, float | None]:
    return terms.classes, terms.recall, terms.threshold


class MatchPlan:
    """The criteria of all watches that select a feed, evaluated with one matrix product.

    Several watches may share a class, so `_columns` maps each criterion to the score of its class.
    """

    def __init__(self, bundle: Bundle, pairs: Sequence[tuple[Watch, Criterion]]) -> None:
        self._bundle, self._pairs = bundle, pairs
        self.class_ids = sorted({criterion.class_id for _, criterion in pairs})
        columns = {class_id: index for index, class_id in enumerate(self.class_ids)}
        self._columns = torch.tensor(
            [columns[criterion.class_id] for _, criterion in pairs], dtype=torch.long
        )
        self.monitored = {(criterion.class_id, criterion.threshold) for _, criterion in pairs}
        # Compare in float64, as queries do, so that both agree at the threshold.
        self._thresholds = torch.tensor(
            [criterion.threshold for _, criterion in pairs], dtype=torch.float64
        )

    def matches(self, features: Tensor, now: float) -> list[Match]:
        """Return the matches of the watches that have not expired at `now`. `features`, [1, dim],
        are the features of one frame."""
        scores = self._bundle.scores(features, self.class_ids)[0].double()[self._columns]
        matched = (scores >= self._thresholds).nonzero()[:, 0].tolist()
        pairs, values = [self._pairs[index] for index in matched], scores[matched].tolist()
        return [
            Match(watch, criterion.class_id, score, criterion.threshold)
            for (watch, criterion), score in zip(pairs, values, strict=True)
            if watch.expires_at > now
        ]
