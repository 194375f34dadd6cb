"""One pass over all classes for a class group's rows: top-k, true scores and SLC measures."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads import ClassHead
from heads.collectives import all_reduce_max, all_reduce_sum
from heads.slc import ClassMeasures, block_measures, places_of_labels
from trainer.evaluation.features import SplitRows, all_rows
from trainer.evaluation.ranking import Ranking
from trainer.evaluation.turns import StopQuestion, Turns
from trainer.world import World

# Shape legend: n rows of this class group, C classes of a block, K of all.

_COPIES = 3  # of a block's scores at one time


@dataclass(frozen=True)
class Walked:
    """`predicted` [n, k] best first, `true_scores` [n], and the measures of all K classes over the
    rows of all groups, on the CPU."""

    predicted: Tensor
    true_scores: Tensor
    classes: ClassMeasures


def walk(
    head: ClassHead,
    rows: SplitRows,
    positives: Tensor,
    *,
    k: int,
    recalls: Sequence[float],
    world: World,
    should_stop: StopQuestion,
) -> Walked:
    """Score all classes (collective); `positives` [K] counts the samples of all groups.

    Raises ValueError on every rank where a score is NaN.
    """
    labels, features = rows.labels, rows.features.mean(1)
    class_group, data_group = head.engine.class_group, head.engine.data_group
    true_scores = torch.zeros(len(labels), device=labels.device, dtype=head.weight.dtype)
    ranking = Ranking(k, true_scores)
    measures = [block_measures(true_scores[:, None][:, :0], labels, labels[:0], recalls)]
    at_once = classes_at_once(head, len(labels))
    turns = Turns(num_blocks(head, at_once), should_stop, world)
    broken = torch.tensor(-1, device=labels.device)
    for block in head.score_blocks(features, at_once):
        turns.take()
        scores, class_ids = block.scores, block.class_ids
        highest = scores.amax(1)
        if highest.isnan().any():  # said at the end, by all ranks: others wait for this one
            broken = class_ids[scores.isnan().any(0)].max()
            scores = scores.nan_to_num()
        ranking.add(scores, class_ids, highest)
        at = places_of_labels(labels, class_ids)
        true_scores[at[0]] = scores[at]
        # A class without a sample has no measures. All groups agree on which have one.
        present = positives[class_ids] > 0
        if present.any():
            own = scores if present.all() else scores[:, present]
            measures.append(
                block_measures(own, labels, class_ids[present], recalls, group=data_group)
            )
    turns.rest()
    _check_numbers(broken, world)
    return Walked(
        ranking.over_ranks(class_group),
        all_reduce_sum(true_scores, class_group),
        _over_ranks(measures, class_group).over_all_classes(head.num_classes),
    )


def classes_at_once(head: ClassHead, num_rows: int) -> int:
    """Classes whose scores for a group's rows fit the head's memory budget; the same in every group
    along `data`, for they measure a block together (collective)."""
    device = head.weight.device
    most = int(all_reduce_max(torch.tensor(num_rows, device=device), head.engine.data_group))
    return max(1, head.engine.memory_bytes // (_COPIES * 4 * max(1, most)))


def num_blocks(head: ClassHead, at_once: int) -> int:
    """The number of blocks, of at most `at_once` nodes, that hold this rank's classes."""
    weights = head.engine.weights
    return -(-(weights.stop - weights.start) // at_once)


def _check_numbers(broken: Tensor, world: World) -> None:
    class_id = int(all_reduce_max(broken, world.group))
    if class_id >= 0:
        raise ValueError(
            f"a score of class {class_id} is NaN: nothing to rank by; look at the weights and at "
            "the inputs"
        )


def _over_ranks(measures: list[ClassMeasures], group: ProcessGroup | None) -> ClassMeasures:
    """The measures of all ranks' classes in ascending order, on the CPU (collective)."""
    mine = ClassMeasures.concatenate(measures)
    tensors = {
        field.name: all_rows(getattr(mine, field.name), group).cpu()
        for field in fields(mine)
        if field.name != "recalls"
    }
    return ClassMeasures.concatenate([ClassMeasures(recalls=mine.recalls, **tensors)])
