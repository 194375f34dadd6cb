"""Compute verdicts from features and a query.

The server, `kway query` on a folder and the tests all use this module.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from serving.schemas import Answer, ClassThreshold, InputVerdicts, Verdict
from trainer.bundle.bundle import Bundle
from trainer.bundle.thresholds import Share

NOT_ALIGNED = (
    "this model was trained with {kind}, which is not aligned with the Principle of Logit "
    "Separation: the logit of a single class is not a reliable score, so interpret these verdicts "
    "with care"
)


@dataclass(frozen=True)
class Query:
    """The classes to test each input for, and an optional decision rule: a target `recall`, which
    selects the per-class thresholds, or an explicit `threshold`. If both are None, only scores are
    computed."""

    class_ids: tuple[int, ...]
    recall: float | None = None
    threshold: float | None = None

    @property
    def decides(self) -> bool:
        return self.recall is not None or self.threshold is not None


def make_query(
    bundle: Bundle,
    classes: Sequence[str | int],
    *,
    recall: float | None = None,
    threshold: float | None = None,
) -> Query:
    """Create a query from class names or ids.

    Raises ValueError if a class is unknown, if the bundle does not contain thresholds for `recall`,
    if `threshold` is not finite, or if both `recall` and `threshold` are set.
    """
    if recall is not None and threshold is not None:
        raise ValueError("recall and threshold are both set. Pass only one of them")
    if threshold is not None and not math.isfinite(threshold):
        raise ValueError(f"threshold is {threshold}. Pass a finite number")
    class_ids = tuple(bundle.class_id(name_or_id) for name_or_id in classes)
    if recall is not None and class_ids:
        bundle.threshold(class_ids[0], recall)  # reject an unknown recall before any work
    return Query(class_ids, recall, threshold)


def answer(bundle: Bundle, features: Tensor, query: Query) -> Answer:
    """Compute verdicts from the features [B, dim] of B inputs. Reads only the rows of the requested
    classes."""
    scores = bundle.scores(features, query.class_ids).tolist()
    thresholds = [threshold_of(bundle, class_id, query) for class_id in query.class_ids]
    loss = bundle.spec.loss
    return Answer(
        version=bundle.version,
        aligned=loss.aligned,
        notice=None if loss.aligned else NOT_ALIGNED.format(kind=loss.kind),
        thresholds=thresholds if query.decides else [],
        results=[
            InputVerdicts(
                input=position,
                verdicts=[verdict(*pair) for pair in zip(thresholds, row, strict=True)],
            )
            for position, row in enumerate(scores)
        ],
    )


def verdict(decided: ClassThreshold, score: float) -> Verdict:
    """Return the verdict on one class for one input."""
    return Verdict(
        class_name=decided.class_name,
        class_id=decided.class_id,
        score=score,
        threshold=decided.threshold,
        threshold_source=decided.threshold_source,
        expected_precision=decided.expected_precision,
        match=None if decided.threshold is None else score >= decided.threshold,
    )


def threshold_of(bundle: Bundle, class_id: int, query: Query) -> ClassThreshold:
    """Return a class's threshold for this query, what it promises, and its validation counts."""
    name = bundle.names.names[class_id]
    if query.recall is None:
        return ClassThreshold(
            class_name=name,
            class_id=class_id,
            threshold=query.threshold,
            threshold_source=None if query.threshold is None else "request",
            class_samples=bundle.positives(class_id),
        )
    found = bundle.threshold(class_id, query.recall)
    return ClassThreshold(
        class_name=name,
        class_id=class_id,
        threshold=found.score,
        threshold_source=found.kind,
        recall=query.recall,
        confidence=found.confidence,
        pass_rate=found.pass_rate and found.pass_rate.estimate,
        pass_rate_interval=_interval(found.pass_rate),
        expected_precision=found.precision and found.precision.estimate,
        expected_precision_interval=_interval(found.precision),
        classes_below_recall=found.below_pooled,
        class_samples=found.class_samples,
        class_reached=found.class_reached,
        all_reached=found.all_reached,
    )


def _interval(share: Share | None) -> tuple[float, float] | None:
    return None if share is None else (share.low, share.high)
