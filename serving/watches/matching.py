"""Evaluate all watches of a feed at once: one matrix product with the rows of all their classes."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.answer import Query, threshold_of
from serving.watches.watch import Terms, WatchState
from trainer.bundle.bundle import Bundle

_log = logging.getLogger("kway.serving")


@dataclass(frozen=True)
class Criterion:
    """A class of a watch and its threshold."""

    class_id: int
    threshold: float


@dataclass(frozen=True)
class Match:
    """A class of a watch that a frame matches."""

    state: WatchState
    class_id: int
    score: float
    threshold: float


class Criteria:
    """The criteria of each watch, computed once per watch."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._known: dict[str, tuple[Terms, list[Criterion]]] = {}

    def of(self, watches: Iterable[WatchState]) -> list[tuple[WatchState, Criterion]]:
        """Every class of every watch. Classes that this model cannot decide, because the watch was
        created for another model, are logged and omitted."""
        known, self._known = self._known, {}
        pairs = []
        for state in watches:
            watch = state.watch
            terms, criteria = known.get(watch.id, (None, []))
            if terms is None or _query_of(terms) != _query_of(watch):
                terms, criteria = watch, self._criteria(watch.id, watch)
            self._known[watch.id] = (terms, criteria)
            pairs += [(state, criterion) for criterion in criteria]
        return pairs

    def _criteria(self, watch_id: str, terms: Terms) -> list[Criterion]:
        criteria = []
        for name in terms.classes:
            try:
                class_id = self._bundle.names.id_of_name(name)
                query = Query((class_id,), terms.recall, terms.threshold)
                threshold = threshold_of(self._bundle, class_id, query).threshold
            except ValueError as error:
                _log.warning("watch %s gets no hits of class %r: %s", watch_id, name, error)
                continue
            if threshold is None:
                _log.warning("watch %s gets no hits of class %r: no threshold", watch_id, name)
                continue
            criteria.append(Criterion(class_id, threshold))
        return criteria


def _query_of(terms: Terms) -> tuple[tuple[str, ...], float | None, float | None]:
    return terms.classes, terms.recall, terms.threshold


class MatchPlan:
    """The criteria of all watches that select a feed, evaluated with one product.

    `_columns` maps each criterion to the score of its class, because several watches may share a
    class.
    """

    def __init__(self, bundle: Bundle, pairs: Sequence[tuple[WatchState, Criterion]]) -> None:
        self._bundle, self._pairs = bundle, pairs
        self.class_ids = sorted({criterion.class_id for _, criterion in pairs})
        columns = {class_id: index for index, class_id in enumerate(self.class_ids)}
        self._columns = torch.tensor(
            [columns[criterion.class_id] for _, criterion in pairs], dtype=torch.long
        )
        # Compare in float64, as Python does for the answer to a query, so that both agree at the
        # threshold.
        self._criteria = torch.tensor(
            [criterion.threshold for _, criterion in pairs], dtype=torch.float64
        )

    def matches(self, features: Tensor, now: float) -> list[Match]:
        """Features [1, dim] of a frame -> the matches of watches that have not expired at `now`."""
        scores = self._bundle.scores(features, self.class_ids)[0].double()[self._columns]
        found = (scores >= self._criteria).nonzero()[:, 0].tolist()
        pairs, values = [self._pairs[index] for index in found], scores[found].tolist()
        return [
            Match(state, criterion.class_id, score, criterion.threshold)
            for (state, criterion), score in zip(pairs, values, strict=True)
            if state.watch.expires_at > now
        ]
