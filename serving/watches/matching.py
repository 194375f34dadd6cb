"""All watches of a feed asked at once: one product with the rows of the union of their classes."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.answer import Question, threshold_of
from serving.watches.watch import Held, Terms
from trainer.bundle.bundle import Bundle

_log = logging.getLogger("kway.serving")


@dataclass(frozen=True)
class Bar:
    """A class of a watch, and the score that decides it."""

    class_id: int
    threshold: float


@dataclass(frozen=True)
class Match:
    """A class of a watch that a frame is of."""

    held: Held
    class_id: int
    score: float
    threshold: float


class Bars:
    """What decides each watch, worked out once a watch."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._known: dict[str, tuple[Terms, list[Bar]]] = {}

    def of(self, watches: Iterable[Held]) -> list[tuple[Held, Bar]]:
        """Every class of every watch. One that this model cannot decide is told of and left out:
        the watch was made for another model."""
        known, self._known = self._known, {}
        pairs = []
        for held in watches:
            watch = held.watch
            terms, bars = known.get(watch.id, (None, []))
            if terms is None or _question(terms) != _question(watch):
                terms, bars = watch, self._bars(watch.id, watch)
            self._known[watch.id] = (terms, bars)
            pairs += [(held, bar) for bar in bars]
        return pairs

    def _bars(self, watch_id: str, terms: Terms) -> list[Bar]:
        bars = []
        for name in terms.classes:
            try:
                class_id = self._bundle.names.id_of_name(name)
                question = Question((class_id,), terms.recall, terms.threshold)
                threshold = threshold_of(self._bundle, class_id, question).threshold
            except ValueError as error:
                _log.warning("watch %s gets no hits of class %r: %s", watch_id, name, error)
                continue
            if threshold is None:
                _log.warning("watch %s gets no hits of class %r: no threshold", watch_id, name)
                continue
            bars.append(Bar(class_id, threshold))
        return bars


def _question(terms: Terms) -> tuple[tuple[str, ...], float | None, float | None]:
    return terms.classes, terms.recall, terms.threshold


class Plan:
    """The questions of all watches that look at a feed, in a form that one product answers."""

    def __init__(self, bundle: Bundle, pairs: Sequence[tuple[Held, Bar]]) -> None:
        self._bundle, self._pairs = bundle, pairs
        self.class_ids = sorted({bar.class_id for _, bar in pairs})
        columns = {class_id: place for place, class_id in enumerate(self.class_ids)}
        self._columns = torch.tensor([columns[bar.class_id] for _, bar in pairs], dtype=torch.long)
        # float64, as Python compares in an answer to a query.
        self._bars = torch.tensor([bar.threshold for _, bar in pairs], dtype=torch.float64)

    def matches(self, features: Tensor, now: float) -> list[Match]:
        """Features [1, dim] of a frame -> what watches that are alive at `now` see in it."""
        scores = self._bundle.scores(features, self.class_ids)[0].double()[self._columns]
        found = (scores >= self._bars).nonzero()[:, 0].tolist()
        pairs, values = [self._pairs[place] for place in found], scores[found].tolist()
        return [
            Match(held, bar.class_id, score, bar.threshold)
            for (held, bar), score in zip(pairs, values, strict=True)
            if held.watch.expires_at > now
        ]
