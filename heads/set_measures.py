"""Measures of label sets: precision, recall, nDCG and PSP at k, and F1 at thresholds.

The measures at k need only the k best classes of each row, and F1 three counts of each class. The
samples may be distributed over ranks. With float64 sums, the results equal those of napkinXC and
scikit-learn on the same scores.
"""

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_reduce_sum
from heads.label_sets import LabelSets

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


def f1_measures(hits: Tensor, predicted: Tensor, positives: Tensor) -> Tensor:
    """Return the micro F1, over all pairs of a row and a class, and the macro F1, the mean of the
    F1 of all classes, float64 [2].

    The counts [C] of all classes are the rows of a class that are predicted, all rows for which it
    is predicted, and its rows. The F1 of a class without labels and predictions is 0.
    """
    twice, total = 2 * hits.double(), (predicted + positives).double()
    of_classes = twice / total.clamp(min=1)
    return torch.stack([twice.sum() / total.sum().clamp(min=1), of_classes.mean()])
