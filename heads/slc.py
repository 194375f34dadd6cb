"""How well one logit alone tells whether a sample is of its class (paper 002, section 6.1).

Average precision, precision at a wanted recall and the threshold that reaches it, for one block of
classes at a time. The samples may be spread over ranks: then true scores travel, and counts of
scores above them, never the scores themselves. Where scores come from is not its business.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_gather_equal, all_reduce_sum, group_rank

# Shape legend: N samples, C classes of a block, P most positives of a class, R recalls.

_CHUNK = 1 << 22  # numbers processed together; bounds the memory in addition to the block
_PER_CLASS = ("class_ids", "positives", "average_precision", "precision_at", "threshold", "reached")


@dataclass(frozen=True)
class ClassMeasures:
    """Measures of C classes at the R `recalls`; NaN for a class without positives.

    `positives` [C] counts samples, `average_precision` [C] is the area under the precision-recall
    curve, `threshold` [C, R] the largest score at which `score >= threshold` reaches the recall,
    `precision_at` [C, R] the precision there; `reached` [C, R, 2] counts the samples at or above
    the threshold: those of the class, and those of any class.
    """

    class_ids: Tensor
    positives: Tensor
    average_precision: Tensor
    precision_at: Tensor
    threshold: Tensor
    reached: Tensor
    recalls: tuple[float, ...]

    @staticmethod
    def concatenate(blocks: Sequence["ClassMeasures"]) -> "ClassMeasures":
        """Join the measures of disjoint blocks, in ascending order of class id."""
        if not blocks or any(block.recalls != blocks[0].recalls for block in blocks):
            raise ValueError("blocks of SLC measures need the same recalls, and at least one block")
        joined = _joined(blocks)
        ids, order = joined.class_ids.sort()
        _check_distinct(ids)
        return replace(joined, **{name: getattr(joined, name)[order] for name in _PER_CLASS})

    def over_all_classes(self, num_classes: int) -> "ClassMeasures":
        """The same with a row for each of the classes 0..num_classes - 1: those that are not
        measured have no positives."""
        ids, device = self.class_ids, self.class_ids.device
        fields: dict[str, Tensor] = {}
        for name in _PER_CLASS[1:]:
            own = getattr(self, name)
            nothing = math.nan if own.is_floating_point() else 0
            fields[name] = own.new_full((num_classes, *own.shape[1:]), nothing)
            fields[name][ids] = own
        everyone = torch.arange(num_classes, device=device)
        return ClassMeasures(class_ids=everyone, recalls=self.recalls, **fields)

    def summary(self) -> dict[str, float]:
        """Means over the classes that have positives: `auprc`, `precision_at_recall_0.9`, ..."""
        present = self.positives > 0
        if not present.any():
            raise ValueError("no class has a sample: SLC measures have nothing to average")
        means = {"auprc": self.average_precision[present].mean().item()}
        for recall, mean in zip(self.recalls, self.precision_at[present].mean(0), strict=True):
            means[f"precision_at_recall_{recall:g}"] = mean.item()
        return means


def block_measures(
    scores: Tensor,
    labels: Tensor,
    class_ids: Tensor,
    recalls: Sequence[float] = (0.9, 0.99),
    *,
    group: ProcessGroup | None = None,
) -> ClassMeasures:
    """Measure the classes `class_ids` [C] from `scores` [N, C] of samples with `labels` [N].

    The ranks of `group` give the same classes on other samples, N of each its own or 0, and get the
    measures over all samples (collective).

    Average precision is the mean over the positives of the precision at their own score, all
    samples of an equal score counted together. Labels outside the block are negatives; a block may
    have no class. Precisions are float64, thresholds of the scores' type. Beside the scores it
    holds their NaN mask and a working set of about 300 MB at most, whatever the block. ValueError
    for NaN, shapes that do not fit, a class given twice or a recall outside (0, 1].
    """
    recalls = _checked_recalls(recalls)
    scores, num_classes = scores.detach(), len(class_ids)
    if scores.shape != (len(labels), num_classes):
        raise ValueError(
            f"scores have shape {tuple(scores.shape)}: give [{len(labels)}, {num_classes}], "
            "samples x classes"
        )
    if scores.isnan().any():
        column = int(scores.isnan().any(0).nonzero()[0])
        raise ValueError(f"a score of class {int(class_ids[column])} is NaN: nothing to rank by")
    rows, columns = places_of_labels(labels, class_ids)
    own = torch.bincount(columns, minlength=num_classes)
    on_ranks = torch.stack(all_gather_equal(own, group))
    positives, before = on_ranks.sum(0), on_ranks[: group_rank(group)].sum(0)
    # Its place among all true scores of its class [n].
    first = before - (own.cumsum(0) - own)
    places = torch.arange(len(columns), device=scores.device) + first[columns]
    ends = [0, *own.cumsum(0).tolist()]
    # A frequent class makes C x P large: then fewer classes are measured together.
    width = max(1, _CHUNK // max([1, *positives.tolist()]))
    parts = []
    for start in range(0, max(1, num_classes), width):
        part = slice(start, min(start + width, num_classes))
        true = slice(ends[part.start], ends[part.stop])
        at = (columns[true] - start, places[true])
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
    places = torch.arange(true_CP.shape[1], device=true_CP.device)
    # Ascending, so the positives at or above a score are those from its leftmost equal onwards.
    true_above = positives[:, None] - torch.searchsorted(true_CP, true_CP)
    precision_CP = true_above.double() / reached_CP
    is_positive = places < positives[:, None]
    average = precision_CP.where(is_positive, 0).sum(1) / positives
    rank_CR = torch.stack([_needed(positives, recall) for recall in recalls], 1)
    place_CR = (positives[:, None] - rank_CR).clamp(min=0)
    empty = (positives == 0)[:, None]
    counts = (true_above.gather(1, place_CR), reached_CP.gather(1, place_CR))
    return ClassMeasures(
        class_ids=class_ids,
        positives=positives,
        average_precision=average,
        precision_at=precision_CP.gather(1, place_CR).masked_fill(empty, math.nan),
        threshold=true_CP.gather(1, place_CR).masked_fill(empty, math.nan),
        reached=torch.stack([one.masked_fill(empty, 0) for one in counts], 2),
        recalls=recalls,
    )


def pooled_thresholds(true_scores: Tensor, recalls: Sequence[float] = (0.9, 0.99)) -> Tensor:
    """One threshold [R] for all classes: the largest that reaches each recall over all of
    `true_scores` [N], every sample's score of its own class."""
    recalls = _checked_recalls(recalls)
    if true_scores.numel() == 0:
        raise ValueError("no true scores: a threshold needs at least one sample")
    if true_scores.isnan().any():
        raise ValueError("a true score is NaN: nothing to rank by")
    ascending = true_scores.flatten().sort().values
    total = torch.tensor(len(ascending), device=true_scores.device)
    return torch.stack([ascending[total - _needed(total, recall)] for recall in recalls])


def places_of_labels(labels: Tensor, class_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns [n] of the true scores in a block of classes, in the order of columns.

    `labels` [N] are of any classes, `class_ids` [C] distinct (else ValueError) and in any order.
    """
    ids, order = class_ids.sort()
    _check_distinct(ids)
    labels = labels.to(ids.dtype).contiguous()
    places = torch.searchsorted(ids, labels).clamp_(max=max(0, len(ids) - 1))
    # Not torch.isin: it compares all pairs where there are not many labels.
    rows = (ids[places] == labels).nonzero().squeeze(1) if len(ids) else places[:0]
    columns, by_column = order[places[rows]].sort(stable=True)
    return rows[by_column], columns


def _true_scores(
    scores: Tensor, at: tuple[Tensor, Tensor], positives: Tensor, group: ProcessGroup | None
) -> Tensor:
    """Each class's true scores, ascending, with +inf behind them [C, P]; P is at least 1. `scores`
    [n] are this rank's, `at` their columns and places [n]."""
    most = max([1, *positives.tolist()])
    true_CP = scores.new_zeros((len(positives), most))
    true_CP[at] = scores
    all_reduce_sum(true_CP, group)  # every place is some rank's, zero on the others
    is_filling = torch.arange(most, device=scores.device) >= positives[:, None]
    return true_CP.masked_fill_(is_filling, math.inf).sort(dim=1).values


def _num_at_or_above(true_CP: Tensor, scores: Tensor, group: ProcessGroup | None) -> Tensor:
    """How many of a class's scores on all ranks are at or above each of its true scores [C, P].

    Every score falls into the gap between two true scores: one pass of binary searches, and no
    comparison of all scores with all true scores.
    """
    num_classes, most = true_CP.shape
    bins = torch.zeros(num_classes * (most + 1), dtype=torch.int64, device=scores.device)
    offset = torch.arange(0, len(bins), most + 1, dtype=torch.int32, device=scores.device)[:, None]
    # 32 bits hold C x P, which block_measures bounds, and halve what is written and read again.
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
    """ceil(recall * positives), not pushed up one by the rounding of a product like 0.55 * 100."""
    return (positives.double() * recall * (1 - 1e-12)).ceil().long()


def _checked_recalls(recalls: Sequence[float]) -> tuple[float, ...]:
    for recall in recalls:
        if not 0 < recall <= 1:
            raise ValueError(f"recall is {recall}: give one above 0 and at most 1")
    if not recalls:
        raise ValueError("no recalls: give at least one above 0 and at most 1")
    return tuple(float(recall) for recall in recalls)


def _check_distinct(ascending_ids: Tensor) -> None:
    twice = (ascending_ids.diff() == 0).nonzero()
    if len(twice):
        raise ValueError(f"class {int(ascending_ids[twice[0, 0]])} is measured twice")
