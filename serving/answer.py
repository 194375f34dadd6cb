"""Compute verdicts from features and a query.

The server, `kway query` on a folder and the tests all use this module.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from heads.topk import largest_columns, sort_largest
from serving.schemas import (
    Answer,
    Classification,
    ClassThreshold,
    InputClasses,
    InputVerdicts,
    Required,
    Verdict,
)
from trainer.bundle.bundle import Bundle

NOT_ALIGNED = (
    "this model was trained with {kind}, which is not aligned with the Principle of Logit "
    "Separation: the logit of a single class is not a reliable score, so interpret these verdicts "
    "with care"
)


class Rule(BaseModel):
    """How a request decides: the thresholds of its classes. Without a rule, it gets only scores."""

    recall: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="target recall that selects the threshold of each class. `threshold_source` in "
        "the response states whether the class has enough validation samples to guarantee the "
        "recall",
    )
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        None, description="minimum score of a match; cannot be combined with recall"
    )
    require: Required | None = Field(
        None,
        description="`guaranteed`: no verdict on a class whose threshold for the recall is not "
        "guaranteed",
    )


@dataclass(frozen=True)
class Query:
    """The classes to test each input for, and an optional decision rule: a target `recall`, which
    selects the per-class thresholds, or an explicit `threshold`. If both are None, only scores are
    computed.

    `overrides` are thresholds by class id that replace those of a recall. If `require` is set,
    classes whose threshold does not have this source have none.
    """

    class_ids: tuple[int, ...]
    recall: float | None = None
    threshold: float | None = None
    require: Required | None = None
    overrides: Mapping[int, float] = field(default_factory=dict)


def make_query(
    bundle: Bundle,
    classes: Sequence[str | int],
    *,
    recall: float | None = None,
    threshold: float | None = None,
    require: Required | None = None,
    overrides: Mapping[int, float] | None = None,
) -> Query:
    """Create a query from class names or ids.

    Raises ValueError if a class is unknown, if the bundle does not contain thresholds for `recall`,
    if `threshold` is not finite, if both `recall` and `threshold` are set, or if `require` is set
    without `recall`.
    """
    if require is not None and recall is None:
        raise ValueError(f"require is {require}, but recall is not set. Pass a recall")
    if recall is not None and threshold is not None:
        raise ValueError("recall and threshold are both set. Pass only one of them")
    if threshold is not None and not math.isfinite(threshold):
        raise ValueError(f"threshold is {threshold}. Pass a finite number")
    class_ids = tuple(bundle.classes.id_of(name_or_id) for name_or_id in classes)
    overrides = overrides or {}
    measured = [class_id for class_id in class_ids if class_id not in overrides]
    if recall is not None and (measured or not class_ids):
        # Reject an unknown recall before any work.
        bundle.threshold(measured[0] if measured else 0, recall)
    return Query(class_ids, recall, threshold, require, overrides)


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
        thresholds=[] if query.recall is None and query.threshold is None else thresholds,
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
    values: dict[str, Any] = {
        "threshold": query.threshold,
        "threshold_source": None if query.threshold is None else "request",
        "class_samples": bundle.positives(class_id),
    }
    if query.recall is not None and class_id in query.overrides:
        values |= {"threshold": query.overrides[class_id], "threshold_source": "override"}
    elif query.recall is not None:
        values = dict(vars(bundle.threshold(class_id, query.recall)))
    source = values["threshold_source"]
    if query.require is not None and source != query.require:
        reason = "this class has none" if source is None else f"that of this class is {source}"
        values = {
            "threshold": None,
            "threshold_source": source,
            "class_samples": values["class_samples"],
            "reason": f"the query requires a {query.require} threshold, but {reason}",
        }
    return ClassThreshold(
        class_name=bundle.classes[class_id].name, class_id=class_id, recall=query.recall, **values
    )


# ------------------------------------------------------------------------- what is this?

MAX_TOP = 100


@torch.inference_mode()
def top_classes(bundle: Bundle, features_BD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the min(k, K) largest scores of each row and the ids of their classes [B, k], in
    descending order of score. Ties go to the lowest id.

    The result is exact. The class weights are read in blocks, so memory does not grow with K.
    """
    best_scores = features_BD.new_empty(len(features_BD), 0)
    best_ids = torch.empty_like(best_scores, dtype=torch.int64)
    for rows in bundle.blocks():
        scores = bundle.scores_of(features_BD, rows)
        columns = largest_columns(scores, rows.class_ids, k)
        best_scores, best_ids = sort_largest(
            torch.cat([best_scores, scores.gather(1, columns)], dim=1),
            torch.cat([best_ids, rows.class_ids[columns]], dim=1),
            k,
        )
    return best_scores, best_ids


def ranked(bundle: Bundle, features_BD: Tensor) -> Tensor:
    """Return the scores and ids of the top classes [B, MAX_TOP or all classes, 2]. Float64
    represents both exactly."""
    scores, ids = top_classes(bundle, features_BD, MAX_TOP)
    return torch.stack([scores.double(), ids.double()], dim=-1)


def classification(bundle: Bundle, ranked: Tensor, query: Query) -> Classification:
    """Return the verdicts on the classes of each input, by the rule of `query`. `ranked` has their
    scores and ids [B, top, 2]."""
    return Classification(
        version=bundle.version,
        results=[
            InputClasses(
                input=position,
                classes=[
                    verdict(threshold_of(bundle, int(class_id), query), score)
                    for score, class_id in pairs
                ],
            )
            for position, pairs in enumerate(ranked.tolist())
        ],
    )
