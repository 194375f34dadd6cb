"""How many samples of a split reach given thresholds, the same for every class."""

import torch
from torch import Tensor

from heads import ClassHead
from heads.collectives import all_reduce_sum
from heads.slc import places_of_labels
from trainer.evaluation.features import SplitRows, all_rows
from trainer.evaluation.turns import StopQuestion, Turns
from trainer.evaluation.walk import classes_at_once, num_blocks
from trainer.world import World

# Shape legend: n rows of this class group, C classes of a block, K of all, R thresholds.


def count_reached(
    head: ClassHead,
    rows: SplitRows,
    thresholds: Tensor,
    *,
    world: World,
    should_stop: StopQuestion,
) -> Tensor:
    """For each class, its samples and the samples of any class whose score for it is at or above
    each of the `thresholds` [R]: [K, R, 2], over all groups and on the CPU (collective).

    All classes are scored again, because pooled thresholds are known only after a first pass.
    """
    features, labels = rows.features.mean(1), rows.labels
    bars = thresholds.tolist()
    at_once = classes_at_once(head, len(labels))
    turns = Turns(num_blocks(head, at_once), should_stop, world)
    ids = [labels[:0]]
    counts = [labels.new_zeros(0, len(bars), 2)]
    for block in head.score_blocks(features, at_once):
        turns.take()
        ids.append(block.class_ids)
        counted = [
            torch.stack(_counts(block.scores, labels, block.class_ids, bar), 1) for bar in bars
        ]
        counts.append(torch.stack(counted, 1))
    turns.rest()
    group = head.engine.class_group
    of_ranks = all_rows(all_reduce_sum(torch.cat(counts), head.engine.data_group), group)
    in_order = torch.empty((head.num_classes, *of_ranks.shape[1:]), dtype=torch.int64)
    in_order[all_rows(torch.cat(ids), group).cpu()] = of_ranks.cpu()
    return in_order


def _counts(scores: Tensor, labels: Tensor, class_ids: Tensor, bar: float) -> tuple[Tensor, Tensor]:
    """For each class of a block, its samples and all samples at or above `bar`, [C] each."""
    reaches_nC = scores >= bar
    rows, columns = places_of_labels(labels, class_ids)
    of_class = torch.bincount(columns[reaches_nC[rows, columns]], minlength=len(class_ids))
    # On a CPU, summing bytes is twice as fast as summing booleans.
    return of_class, reaches_nC.view(torch.uint8).sum(0, dtype=torch.int32).long()
