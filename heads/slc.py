"""Single-logit classification: how well a class's logit decides whether a sample belongs to it.

This module computes the metrics of section 6.1 of paper 002 for one block of classes at a time:
average precision, precision at a given recall, and the threshold that reaches this recall. If the
samples are distributed over ranks, the ranks exchange only the true scores and, for each of them,
the number of scores at or above it. For example, a class with the true scores 5 and 2 and the false
scores 3 and 1 has the counts 1 (at or above 5) and 3 (at or above 2). Its precisions are therefore
1/1 and 2/3, and its average precision is 5/6.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_gather_equal, all_reduce_sum, group_rank
from heads.label_sets import LabelSets, class_ids_of

# Shape legend: N samples, C classes of a block, P largest number of positives, R recalls.

_CHUNK = 1 << 22  # numbers processed at a time; bounds the memory needed besides the block
_PER_CLASS = ("class_ids", "positives", "average_precision", "precision_at", "threshold")


@dataclass(frozen=True)
class ClassMeasures:
    """Metrics of C classes at the R `recalls`; NaN for a class without positives.

    `positives` [C] is the number of samples of each class, and `average_precision` [C] is the area
    under the precision-recall curve. `threshold` [C, R] is the largest value for which the decision
    rule `score >= threshold` reaches the recall, and `precision_at` [C, R] is the precision at this
    threshold.
    """

    class_ids: Tensor
    positives: Tensor
    average_precision: Tensor
    precision_at: Tensor
    threshold: Tensor
    recalls: tuple[float, ...]

    @staticmethod
    def concatenate(blocks: Sequence["ClassMeasures"]) -> "ClassMeasures":
        """Concatenate the metrics of disjoint blocks with the same recalls, in ascending order of
        class ID."""
        joined = _joined(blocks)
        order = joined.class_ids.argsort()
        return replace(joined, **{name: getattr(joined, name)[order] for name in _PER_CLASS})

    def summary(self) -> dict[str, float]:
        """Return means over the classes with positives: `auprc`, `precision_at_recall_0.9`, ..."""
        present = self.positives > 0
        if not present.any():
            raise ValueError("SLC measures need at least one class with a sample, got none")
        means = {"auprc": self.average_precision[present].mean().item()}
        for recall, mean in zip(self.recalls, self.precision_at[present].mean(0), strict=True):
            means[f"precision_at_recall_{recall:g}"] = mean.item()
        return means


def block_measures(
    scores: Tensor,
    labels: Tensor | LabelSets,
    class_ids: Tensor,
    recalls: Sequence[float] = (0.9, 0.99),
    *,
    group: ProcessGroup | None = None,
) -> ClassMeasures:
    """Return the metrics of the classes `class_ids` [C], given the scores of N samples.

    `scores` are [N, C], and `labels` are [N] or label sets of N rows. The ranks of `group` pass the
    same classes and different samples; N may differ and may be 0. Every rank returns the metrics
    over all samples (collective).

    Average precision is the mean over the positives of the precision at their own score, where
    samples with equal scores are counted together. Samples with labels outside the block are
    negatives. A block may have no classes. Precisions are float64; thresholds have the dtype of the
    scores. Besides the scores, this needs memory for their NaN mask and for a working set of at
    most about 300 MB. Raises ValueError for NaN, mismatched shapes or a recall outside (0, 1].
    """
    recalls = _checked_recalls(recalls)
    scores, num_classes = scores.detach(), len(class_ids)
    if scores.shape != (len(labels), num_classes):
        raise ValueError(
            f"scores have shape {tuple(scores.shape)}: pass [{len(labels)}, {num_classes}], "
            "samples x classes"
        )
    if scores.isnan().any():
        column = int(scores.isnan().any(0).nonzero()[0])
        raise ValueError(
            f"a score of class {int(class_ids[column])} is NaN, which cannot be ranked: check the "
            "model's weights and inputs"
        )
    _, rows, columns = positions_of_labels(labels, class_ids)
    own = torch.bincount(columns, minlength=num_classes)
    on_ranks = torch.stack(all_gather_equal(own, group))
    positives, before = on_ranks.sum(0), on_ranks[: group_rank(group)].sum(0)
    # The index of each true score among all true scores of its class, on all ranks [n].
    first = before - (own.cumsum(0) - own)
    positions = torch.arange(len(columns), device=scores.device) + first[columns]
    ends = [0, *own.cumsum(0).tolist()]
    # A frequent class makes C x P large, so process fewer classes at a time in that case.
    width = max(1, _CHUNK // max([1, *positives.tolist()]))
    parts = []
    for start in range(0, max(1, num_classes), width):
        part = slice(start, min(start + width, num_classes))
        true = slice(ends[part.start], ends[part.stop])
        at = (columns[true] - start, positions[true])
        true_scores = scores[rows[true], columns[true]]
        true_CP = _true_scores(true_scores, at, positives[part], group)
        reached_CP = _num_at_or_above(true_CP, scores[:, part], group)
        parts.append(_measures(true_CP, reached_CP, class_ids[part], positives[part], recalls))
    return _joined(parts)


def _measures(
    true_CP: Tensor,
    reached_CP: Tensor,
    class_ids: Tensor,
    positives: Tensor,
    recalls: tuple[float, ...],
) -> ClassMeasures:
    index = torch.arange(true_CP.shape[1], device=true_CP.device)
    # True scores are ascending, so the positives at or above a score start at the first one that is
    # equal to it.
    true_above = positives[:, None] - torch.searchsorted(true_CP, true_CP)
    precision_CP = true_above.double() / reached_CP
    is_positive = index < positives[:, None]
    average = precision_CP.where(is_positive, 0).sum(1) / positives
    rank_CR = torch.stack([_needed(positives, recall) for recall in recalls], 1)
    index_CR = (positives[:, None] - rank_CR).clamp(min=0)
    empty = (positives == 0)[:, None]
    return ClassMeasures(
        class_ids=class_ids,
        positives=positives,
        average_precision=average,
        precision_at=precision_CP.gather(1, index_CR).masked_fill(empty, math.nan),
        threshold=true_CP.gather(1, index_CR).masked_fill(empty, math.nan),
        recalls=recalls,
    )


def positions_of_labels(
    labels: Tensor | LabelSets, class_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices [n] of the labels in a block of classes, and the rows and columns [n] of
    their scores, ordered by column.

    `labels` [N], or those of label sets of N rows, may be outside the block; `class_ids` [C] are
    distinct, in any order.
    """
    ids, order = class_ids.sort()
    given = class_ids_of(labels).to(ids.dtype).contiguous()
    positions = torch.searchsorted(ids, given).clamp_(max=max(0, len(ids) - 1))
    # Do not use torch.isin, which compares all pairs if there are few labels.
    found = (ids[positions] == given).nonzero().squeeze(1) if len(ids) else positions[:0]
    columns, by_column = order[positions[found]].sort(stable=True)
    found = found[by_column]
    rows = labels.row_of_label[found] if isinstance(labels, LabelSets) else found
    return found, rows, columns


def _true_scores(
    scores: Tensor, at: tuple[Tensor, Tensor], positives: Tensor, group: ProcessGroup | None
) -> Tensor:
    """Return each class's true scores [C, P], ascending and padded with +inf (collective).

    The result covers all ranks; P is at least 1. `scores` [n] are this rank's true scores, and `at`
    contains their (column, index) in the result before sorting.
    """
    most = max([1, *positives.tolist()])
    true_CP = scores.new_zeros((len(positives), most))
    true_CP[at] = scores
    # Each entry is set on one rank and zero on all others, so the sum concatenates the scores.
    all_reduce_sum(true_CP, group)
    is_padding = torch.arange(most, device=scores.device) >= positives[:, None]
    return true_CP.masked_fill_(is_padding, math.inf).sort(dim=1).values


def _num_at_or_above(true_CP: Tensor, scores: Tensor, group: ProcessGroup | None) -> Tensor:
    """Count the scores of each class that are at or above each of its true scores [C, P].

    For every score, a binary search finds the interval between two true scores that contains it. A
    histogram counts the scores per interval, and its sums from the right are the result. This
    avoids comparing all scores with all true scores. The counts are over all ranks (collective).
    """
    num_classes, most = true_CP.shape
    bins = torch.zeros(num_classes * (most + 1), dtype=torch.int64, device=scores.device)
    offset = torch.arange(0, len(bins), most + 1, dtype=torch.int32, device=scores.device)[:, None]
    # 32-bit indices halve the memory traffic. They suffice because block_measures bounds C x P.
    for rows in scores.split(max(1, _CHUNK // max(1, num_classes))):
        reached = torch.searchsorted(true_CP, rows.T.contiguous(), right=True, out_int32=True)
        bins += torch.bincount(reached.add_(offset).flatten(), minlength=len(bins))
    all_reduce_sum(bins, group)
    reached_CP = bins.view(num_classes, most + 1)[:, 1:]
    return reached_CP.flip(1).cumsum(1).flip(1)


def _joined(blocks: Sequence[ClassMeasures]) -> ClassMeasures:
    joined = {name: torch.cat([getattr(block, name) for block in blocks]) for name in _PER_CLASS}
    return ClassMeasures(**joined, recalls=blocks[0].recalls)


def _needed(positives: Tensor, recall: float) -> Tensor:
    """Return ceil(recall * positives), corrected for rounding: 0.55 * 100 is 55.00000000000001."""
    return (positives.double() * recall * (1 - 1e-12)).ceil().long()


def _checked_recalls(recalls: Sequence[float]) -> tuple[float, ...]:
    for recall in recalls:
        if not 0 < recall <= 1:
            raise ValueError(f"recall is {recall}: pass a value above 0 and at most 1")
    if not recalls:
        raise ValueError("recalls are empty: pass at least one value above 0 and at most 1")
    return tuple(float(recall) for recall in recalls)
