"""The classes with the largest scores among all classes: "what is this?"."""

import torch
from torch import Tensor

from heads.topk import largest_columns, sort_largest
from serving.answer import Query, threshold_of, verdict
from serving.schemas import Classification, InputClasses
from trainer.bundle.bundle import Bundle

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
