"""How many samples of a split reach given thresholds of each class."""

import torch
from torch import Tensor

from heads import ClassHead
from heads.collectives import all_reduce_sum
from heads.slc import places_of_labels
from trainer.evaluation.features import SplitRows, all_rows
from trainer.evaluation.turns import StopQuestion, Turns
from trainer.evaluation.walk import classes_at_once, num_blocks
from trainer.world import World

# Shape legend: n rows of this class group, C classes of a block, K of all, T thresholds of a class.


def count_reached(
    head: ClassHead,
    rows: SplitRows,
    thresholds: Tensor,
    *,
    world: World,
    should_stop: StopQuestion,
) -> Tensor:
    """Samples with a score at or above each of a class's `thresholds` [K, T]: of the class itself,
    and of any class [K, T, 2] (collective).

    All classes are scored again, for a pooled threshold is known only after a first pass. The
    counts are over all groups; they and the thresholds are on the CPU. Nothing reaches NaN.
    """
    features, labels = rows.features.mean(1), rows.labels
    at_once = classes_at_once(head, len(labels))
    turns = Turns(num_blocks(head, at_once), should_stop, world)
    ids = [labels[:0]]
    counts = [labels.new_zeros(0, thresholds.shape[1], 2)]
    for block in head.score_blocks(features, at_once):
        turns.take()
        ids.append(block.class_ids)
        bars_CT = thresholds[block.class_ids.cpu()].to(block.scores)
        counts.append(_count_block(block.scores, labels, block.class_ids, bars_CT))
    turns.rest()
    group = head.engine.class_group
    of_ranks = all_rows(all_reduce_sum(torch.cat(counts), head.engine.data_group), group)
    in_order = torch.empty((len(thresholds), *of_ranks.shape[1:]), dtype=torch.int64)
    in_order[all_rows(torch.cat(ids), group).cpu()] = of_ranks.cpu()
    return in_order


def _count_block(scores: Tensor, labels: Tensor, class_ids: Tensor, bars_CT: Tensor) -> Tensor:
    """Samples that reach the bars of a block's classes [C, T, 2]: of the class, and of any."""
    rows, columns = places_of_labels(labels, class_ids)
    own_nT = scores[rows, columns, None] >= bars_CT[columns]
    of_class = labels.new_zeros(bars_CT.shape).index_add_(0, columns, own_nT.long())
    # One threshold at a time, so that n x C x T is never held.
    of_any = [(scores >= bars).sum(0) for bars in bars_CT.T]
    return torch.stack([of_class, torch.stack(of_any, 1)], 2)
