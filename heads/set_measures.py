"""Measures of label sets: precision, recall, nDCG and PSP at k, and F1 at thresholds.

The measures at k need only the k best classes of each row. The numbers that F1 needs are sums over
classes, so they can be computed one block of classes at a time. The samples and the classes may be
distributed over ranks. With float64 sums, the results equal those of napkinXC and scikit-learn on
the same scores.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_reduce_sum
from heads.label_sets import LabelSets
from heads.slc import positions_of_labels

# Shape legend: n rows, C classes of a block, K all classes, k best classes of a row, P labels.

_ROW = 1 << 31  # above any class ID


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
    labels, divided by the largest possible sum. Raises ValueError if the numbers of rows differ.
    """
    if len(predicted) != len(sets):
        raise ValueError(
            f"there are predictions for {len(predicted)} rows, but label sets of {len(sets)}: pass "
            "the same rows"
        )
    num_rows, k = predicted.shape
    device, row_of_label = predicted.device, sets.row_of_label
    rows = torch.arange(num_rows, device=device).unsqueeze(1)
    keys = row_of_label * _ROW + sets.labels
    hits = torch.zeros(num_rows, k, dtype=torch.float64, device=device)
    if len(keys):
        wanted = rows * _ROW + predicted
        found = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
        hits = (keys[found] == wanted).double()
    places = torch.arange(1, k + 1, device=device)
    discounts = 1 / (places + 1).double().log2()
    sizes = sets.sizes.unsqueeze(1)
    # The best possible DCG of a row at each k is the sum of the first min(k, size) discounts.
    best_dcg = discounts.cumsum(0)[(places.minimum(sizes) - 1).clamp(min=0)]
    sums = [
        hits.sum(0).cumsum(0) / places,
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
        place = torch.arange(len(order), device=device) - sets.offsets[row_of_label]
        largest = hits.new_zeros(k + 1).index_add_(0, place.clamp(max=k), gains[order])
        sums.append(largest[:k].cumsum(0))
    precision, recall, ndcg, total, *of_psp = all_reduce_sum(torch.stack(sums), group).unbind()
    measures = {"precision": precision, "recall": recall, "ndcg": ndcg}
    measures = {name: each / total.clamp(min=1) for name, each in measures.items()}
    return measures | ({"psp": of_psp[0] / of_psp[1]} if of_psp else {})


@dataclass(frozen=True)
class F1Sums:
    """Sums over classes for the F1 measures; the sums of disjoint sets of classes add up.

    These are the numbers of pairs (row, class) that are predicted and labels, that are predicted,
    and that are labels; and the sum of the F1 of each class, which is 0 for a class without labels
    and predictions, and the number of classes.
    """

    hits: float = 0.0
    predicted: float = 0.0
    labels: float = 0.0
    of_classes: float = 0.0
    num_classes: float = 0.0

    def __add__(self, other: "F1Sums") -> "F1Sums":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return F1Sums(*(one + another for one, another in pairs))

    def over_ranks(self, group: ProcessGroup | None, device: torch.device) -> "F1Sums":
        """Return the sums over the classes of all ranks of a class group (collective)."""
        sums = torch.tensor([*vars(self).values()], dtype=torch.float64, device=device)
        return F1Sums(*all_reduce_sum(sums, group).tolist())

    @property
    def micro(self) -> float:
        """F1 of all pairs of rows and classes."""
        return 2 * self.hits / max(self.predicted + self.labels, 1)

    @property
    def macro(self) -> float:
        """The mean of the F1 of all classes."""
        return self.of_classes / max(self.num_classes, 1)


def block_f1(
    scores: Tensor,
    labels: Tensor | LabelSets,
    class_ids: Tensor,
    thresholds: Tensor | float,
    *,
    group: ProcessGroup | None = None,
) -> F1Sums:
    """Return the sums of a block of classes, in which a score of at least the threshold of the
    class, `thresholds` [C] or one for all, is a prediction (collective).

    `scores` are [n, C], of the classes `class_ids` [C]. The ranks of `group` pass the same classes
    and different rows; n may be 0.
    """
    rows, columns = positions_of_labels(labels, class_ids)
    reached = scores >= thresholds
    counts = torch.stack(
        [
            torch.bincount(columns[reached[rows, columns]], minlength=len(class_ids)),
            reached.sum(0),
            torch.bincount(columns, minlength=len(class_ids)),
        ]
    )
    hits, predicted, positives = all_reduce_sum(counts, group).double()
    f1 = 2 * hits / (predicted + positives).clamp(min=1)
    sums = torch.stack([hits, predicted, positives, f1, torch.ones_like(f1)])
    return F1Sums(*sums.sum(1).tolist())
