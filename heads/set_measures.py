"""Measures of label sets: precision, recall, nDCG and PSP at k, and F1 at thresholds.

The measures at k need only the k best classes of each row. The numbers that F1 needs are sums over
classes, so they can be computed one block of classes at a time. The samples and the classes may be
distributed over ranks. With float64 sums, the results equal those of napkinXC and scikit-learn on
the same scores.
"""

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_reduce_sum
from heads.label_sets import LabelSets
from heads.slc import positions_of_labels

# Shape legend: n rows, C classes of a block, K all classes, k best classes of a row, P labels.


def inverse_propensities(
    class_counts: Tensor, num_samples: int, *, a: float = 0.55, b: float = 1.5
) -> Tensor:
    """Return 1/p [K], float64, with the propensities p of Jain et al. 2016 (section 4.2).

    `class_counts` [K] are the numbers of training samples with each label, out of `num_samples`.
    1/p = 1 + C (N_j + b)^-a with C = (log N - 1) (b + 1)^a. The authors use a = 0.5 and b = 0.4 for
    Wikipedia, 0.6 and 2.6 for Amazon, and the defaults for other data sets.
    """
    scale = (math.log(num_samples) - 1) * (b + 1) ** a
    return 1 + scale * (class_counts.double() + b) ** -a


def measures_at_k(
    predicted: Tensor,
    sets: LabelSets,
    inverse_propensities: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Return `precision`, `recall`, `ndcg` and, given inverse propensities [K], `psp`: each [k] for
    the first 1 to k of the predicted classes, float64 (collective).

    `predicted` [n, k] are distinct class IDs, the best first, of the n rows of `sets`. The ranks of
    `group` pass different rows; n may be 0. All but PSP are means over rows, in which a row without
    labels counts as 0. PSP is the sum over rows of the inverse propensities of the predicted
    labels, divided by the largest possible sum; NaN if no row has labels. Raises ValueError if the
    numbers of rows differ.
    """
    if len(predicted) != len(sets):
        raise ValueError(
            f"there are predictions for {len(predicted)} rows, but label sets of {len(sets)}: pass "
            "the same rows"
        )
    sets, predicted = sets.long(), predicted.long()
    num_rows, k = predicted.shape
    device, row_of_label = predicted.device, sets.row_of_label
    hits = sets.contain(predicted).double()
    positions = torch.arange(1, k + 1, device=device)
    discounts = 1 / (positions + 1).double().log2()
    sizes = sets.sizes.unsqueeze(1)
    # The best possible DCG of a row at each k is the sum of the first min(k, size) discounts.
    best_dcg = discounts.cumsum(0)[(positions.minimum(sizes) - 1).clamp(min=0)]
    sums = [
        hits.sum(0).cumsum(0) / positions,
        (hits.cumsum(1) / sizes.clamp(min=1)).sum(0),
        ((hits * discounts).cumsum(1) / best_dcg).sum(0),
        torch.full_like(discounts, num_rows),
    ]
    if inverse_propensities is not None:
        gains = inverse_propensities.double()
        sums.append((hits * gains[predicted]).sum(0).cumsum(0))
        # Sort the labels by their rows and, within a row, by descending inverse propensity.
        gains, order = gains[sets.labels].sort(descending=True)
        order = row_of_label[order].argsort(stable=True)
        position = torch.arange(len(order), device=device) - sets.offsets[row_of_label]
        largest = hits.new_zeros(k + 1).index_add_(0, position.clamp(max=k), gains[order])
        sums.append(largest[:k].cumsum(0))
    precision, recall, ndcg, total, *of_psp = all_reduce_sum(torch.stack(sums), group).unbind()
    measures = {"precision": precision, "recall": recall, "ndcg": ndcg}
    measures = {name: each / total.clamp(min=1) for name, each in measures.items()}
    return measures | ({"psp": of_psp[0] / of_psp[1]} if of_psp else {})


def f1_sums(
    scores: Tensor,
    labels: Tensor | LabelSets,
    class_ids: Tensor,
    thresholds: Tensor | float,
    *,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return the sums over a block of classes from which `f1_measures` computes F1, float64 [5]
    (collective). Add up the sums of disjoint blocks and of the ranks of a class group.

    `scores` are [n, C], of the classes `class_ids` [C]. A score of at least the threshold of the
    class, `thresholds` [C] or one for all, is a prediction. The ranks of `group` pass the same
    classes and different rows; n may be 0. Raises ValueError if the numbers of rows differ.
    """
    if len(scores) != len(labels):
        raise ValueError(
            f"there are scores of {len(scores)} rows, but labels of {len(labels)}: pass the same "
            "rows"
        )
    _, rows, columns = positions_of_labels(labels, class_ids)
    reached = scores >= thresholds
    counts = [
        torch.bincount(columns[reached[rows, columns]], minlength=len(class_ids)),
        reached.sum(0),
        torch.bincount(columns, minlength=len(class_ids)),
    ]
    return f1_sums_of_counts(*all_reduce_sum(torch.stack(counts), group))


def f1_sums_of_counts(hits: Tensor, predicted: Tensor, positives: Tensor) -> Tensor:
    """Return the same sums from counts [C]: the rows of each class that are predicted, all rows
    for which it is predicted, and its rows."""
    hits, predicted, positives = hits.double(), predicted.double(), positives.double()
    of_classes = 2 * hits / (predicted + positives).clamp(min=1)
    return torch.stack([hits, predicted, positives, of_classes, torch.ones_like(hits)]).sum(1)


def f1_measures(sums: Tensor) -> dict[str, float]:
    """Return `micro_f1`, over all pairs of a row and a class, and `macro_f1`, the mean of the F1 of
    all classes, from `f1_sums`. The F1 of a class without labels and predictions is 0."""
    hits, predicted, positives, of_classes, num_classes = sums.tolist()
    return {
        "micro_f1": 2 * hits / max(predicted + positives, 1),
        "macro_f1": of_classes / max(num_classes, 1),
    }
