"""From features and a question to verdicts: the one place where a model's answer is made.

The server, `kway query` on a folder and the tests all come through here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from serving.verdicts import Answer, InputVerdicts, Verdict
from trainer.bundle import Bundle

NOT_ALIGNED = (
    "this model was trained with {kind}, which is not aligned with the Principle of Logit "
    "Separation: the logit of one class says little on its own, take these verdicts with care"
)


@dataclass(frozen=True)
class Question:
    """Is each input of these classes? By the threshold of a recall, by a given one, or by none."""

    class_ids: tuple[int, ...]
    recall: float | None = None
    threshold: float | None = None


def ask(
    bundle: Bundle,
    classes: Sequence[str | int],
    *,
    recall: float | None = None,
    threshold: float | None = None,
) -> Question:
    """Make a question of class names or ids.

    Raises ValueError for an unknown class, a recall without thresholds, a threshold that is not
    finite, or both given.
    """
    if recall is not None and threshold is not None:
        raise ValueError("give recall or threshold, not both")
    if threshold is not None and not math.isfinite(threshold):
        raise ValueError(f"threshold {threshold} decides nothing: give a finite number")
    class_ids = tuple(bundle.class_id(wanted) for wanted in classes)
    if recall is not None and class_ids:
        bundle.threshold(class_ids[0], recall)  # an unknown recall is refused before any work
    return Question(class_ids, recall, threshold)


def answer(bundle: Bundle, features: Tensor, question: Question) -> Answer:
    """Features [B, dim] -> verdicts for B inputs, reading only the rows of the classes asked."""
    scores = bundle.scores(features, question.class_ids).tolist()
    asked = [
        (class_id, bundle.names.names[class_id], *threshold_of(bundle, class_id, question))
        for class_id in question.class_ids
    ]
    loss = bundle.spec.loss
    return Answer(
        aligned=loss.aligned,
        notice=None if loss.aligned else NOT_ALIGNED.format(kind=loss.kind),
        results=[
            InputVerdicts(
                input=place,
                verdicts=[
                    Verdict(
                        class_name=name,
                        class_id=class_id,
                        score=score,
                        threshold=bar,
                        threshold_source=source,
                        match=None if bar is None else score >= bar,
                    )
                    for (class_id, name, bar, source), score in zip(asked, row, strict=True)
                ],
            )
            for place, row in enumerate(scores)
        ],
    )


def threshold_of(
    bundle: Bundle, class_id: int, question: Question
) -> tuple[float | None, Literal["class", "pooled", "request"] | None]:
    """What decides a class in this question, and where it is from; nothing where nothing does."""
    if question.threshold is not None:
        return question.threshold, "request"
    if question.recall is not None:
        return bundle.threshold(class_id, question.recall)
    return None, None
