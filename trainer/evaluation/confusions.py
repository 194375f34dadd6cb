"""The classes that a model takes for one another most often, without a K x K matrix."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer.evaluation.features import all_rows

MOST_CONFUSIONS = 1000  # pairs that an evaluation keeps


def most_confused(
    labels: Tensor, predicted: Tensor, num_classes: int, group: ProcessGroup | None
) -> Tensor:
    """The `MOST_CONFUSIONS` most frequent wrong predictions, int64 [M, 3]: true class, predicted
    class, samples.

    `labels` [n] and `predicted` [n] are of this rank's rows; those of all ranks of `group` are
    counted (collective). Of equally frequent pairs those of the lowest classes come first.
    """
    wrong = labels != predicted
    pairs, counts = (labels[wrong] * num_classes + predicted[wrong]).unique(return_counts=True)
    # A pair is sent once a rank, and never more of them than there are samples.
    pairs, counts = all_rows(pairs, group), all_rows(counts, group)
    pairs, place = pairs.unique(return_inverse=True)
    totals = torch.zeros_like(pairs).index_add_(0, place, counts)
    order = totals.argsort(descending=True, stable=True)[:MOST_CONFUSIONS]
    pairs = pairs[order]
    return torch.stack([pairs // num_classes, pairs % num_classes, totals[order]], dim=1)
