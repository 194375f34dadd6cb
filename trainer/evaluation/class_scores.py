"""The rows of a split that a class group evaluates, and passes over all classes for these rows.

Each rank computes the features of its share of the split, and the ranks of a class group gather
their shares. The first pass over the classes computes the top-k classes, the scores of the true
classes and the single-logit (SLC) metrics. A second pass counts the samples that reach given
thresholds.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from data.loading.batch import Batch
from heads import ClassHead, LabelSets
from heads.collectives import all_gather_equal, all_gather_rows, all_reduce_max, all_reduce_sum
from heads.head import ClassScores as BlockScores
from heads.label_sets import class_ids_of, concatenate_labels
from heads.rows.node_values import wide_dtype
from heads.slc import ClassMeasures, block_measures, positions_of_labels
from heads.topk import largest_columns, sort_largest
from trainer.promises import Promises
from trainer.task import Task, labels_of
from trainer.world import World

# Shape legend: N rows, of which n belong to this class group; C classes of a block; K classes in
# total; k best classes; R thresholds.

_NO_CLASS = torch.iinfo(torch.int64).max  # sorts after every class with the same score
_COPIES = 3  # copies of a block's scores in memory at the same time
_CLASSES_AT_ONCE = 1 << 20  # whose counts are sent to the main rank


@dataclass(frozen=True)
class SplitRows:
    """The rows of a split that one class group evaluates: `features` [n, d], and `labels` [n] or
    label sets of n rows. All ranks of the group have the same rows."""

    features: Tensor
    labels: Tensor | LabelSets


def gathered_rows(
    task: Task,
    batches: Iterable[Batch],
    world: World,
    *,
    progress: Callable[[int], None] = lambda samples: None,
    check: Callable[[], None] = lambda: None,
) -> SplitRows:
    """Run the backbone over this rank's `batches` and gather its class group's rows (collective).

    Every rank must have the same number of batches, including empty ones, because the forward pass
    of a sharded backbone is collective. `check` is called before each batch.
    """
    # An empty split has no batches.
    features = [torch.empty((0, task.head.dim), device=world.device)]
    labels: list[Tensor | LabelSets] = []
    for batch in batches:
        check()
        features.append(task.features(batch.inputs))
        labels.append(labels_of(batch).to(world.device))
        if batch.num_rows:
            progress(batch.num_rows)
    mine = torch.cat(features)
    features.clear()  # otherwise they would be in memory twice during the gather
    group = task.head.engine.class_group
    nothing = torch.empty(0, dtype=torch.int64, device=world.device)
    own, found = concatenate_labels(labels or [nothing]), all_rows(mine, group)
    if isinstance(own, Tensor):
        return SplitRows(found, all_rows(own, group))
    sets = LabelSets.of_sizes(all_rows(own.labels, group), all_rows(own.sizes, group))
    return SplitRows(found, sets)


def all_rows(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather tensors [b, ...] from all ranks in `group`, in rank order (collective). b may differ
    between ranks.
    """
    count = torch.tensor([len(tensor)], device=tensor.device)
    sizes = torch.cat(all_gather_equal(count, group)).tolist()
    return all_gather_rows(tensor, sizes, group)


class Ranking:
    """The k highest scores of each row over all blocks so far. Ties are broken in favor of the
    lowest class ID.
    """

    def __init__(self, k: int, like_N: Tensor) -> None:
        """`k` is at most the number of classes; `like_N` [N, ...] has the dtype and device of the
        scores."""
        self._k = k
        self._scores = like_N.new_full((len(like_N), k), -torch.inf)
        self._class_ids = torch.full_like(self._scores, _NO_CLASS, dtype=torch.int64)

    def add(self, scores_NC: Tensor, class_ids_C: Tensor, highest_N: Tensor) -> None:
        """Add a block of classes. `highest_N` is the maximum of each row."""
        # After a few blocks, most rows have no new top-k score in a block. Such rows are detected
        # by their maximum, which is cheaper to compute than a top-k.
        rows = (highest_N >= self._scores[:, -1]).nonzero().squeeze(1)
        if len(rows) == 0:
            return
        improved = scores_NC if len(rows) == len(scores_NC) else scores_NC[rows]
        best = largest_columns(improved, class_ids_C, self._k)
        self._scores[rows], self._class_ids[rows] = sort_largest(
            torch.cat([self._scores[rows], improved.gather(1, best)], dim=1),
            torch.cat([self._class_ids[rows], class_ids_C[best]], dim=1),
            self._k,
        )

    def over_ranks(self, group: ProcessGroup | None) -> Tensor:
        """Return the best class IDs [N, k] over the classes of all ranks, best first
        (collective).
        """
        scores = torch.cat(all_gather_equal(self._scores, group), dim=1)
        class_ids = torch.cat(all_gather_equal(self._class_ids, group), dim=1)
        return sort_largest(scores, class_ids, self._k)[1]


@dataclass(frozen=True)
class ClassScores:
    """The scores of all classes. `predicted` [n, k] contains class IDs, best first, and
    `true_scores` [L] contains the scores of the L labels of the rows, one per row without label
    sets. The metrics of the P classes with samples cover the rows of all groups and are on the CPU.
    """

    predicted: Tensor
    true_scores: Tensor
    classes: ClassMeasures


def score_classes(
    head: ClassHead,
    rows: SplitRows,
    measured: Tensor,
    *,
    k: int,
    recalls: Sequence[float],
    world: World,
    check: Callable[[], None],
) -> ClassScores:
    """Score all classes (collective). `measured` [P] are the classes with samples in any group, in
    ascending order.

    Raises ValueError on every rank if a score is NaN.
    """
    labels = rows.labels
    class_group, data_group = head.engine.class_group, head.engine.data_group
    dtype = wide_dtype(head.weight.dtype)
    true_scores = torch.zeros(len(class_ids_of(labels)), device=measured.device, dtype=dtype)
    no_scores = true_scores.new_empty(len(labels), 0)
    ranking = Ranking(k, no_scores)
    measures = [block_measures(no_scores, labels, measured[:0], recalls)]
    nan_class = torch.tensor(-1, device=measured.device)
    for block in _scored_blocks(head, rows, world, check):
        scores, class_ids = block.scores, block.class_ids
        highest = scores.amax(1)
        if highest.isnan().any():  # raised after the loop, because other ranks wait for this one
            nan_class = class_ids[scores.isnan().any(0)].max()
            scores = scores.nan_to_num()
        ranking.add(scores, class_ids, highest)
        found, *at = positions_of_labels(labels, class_ids)
        true_scores[found] = scores[tuple(at)]
        # Skip classes without samples, which have no metrics. `measured` covers all groups, so all
        # of them skip the same classes and issue the same collectives.
        nearest = torch.searchsorted(measured, class_ids).clamp_(max=len(measured) - 1)
        present = measured[nearest] == class_ids
        if present.any():
            own = scores if present.all() else scores[:, present]
            measures.append(
                block_measures(own, labels, class_ids[present], recalls, group=data_group)
            )
    _check_numbers(nan_class, world)
    return ClassScores(
        ranking.over_ranks(class_group),
        all_reduce_sum(true_scores, class_group),
        _over_ranks(measures, class_group),
    )


def _scored_blocks(
    head: ClassHead, rows: SplitRows, world: World, check: Callable[[], None]
) -> Iterator[BlockScores]:
    """Yield the scores of this rank's classes in blocks that fit in the head's memory budget
    (collective).

    All groups along `data` process each block together, so their blocks have the same size. Their
    numbers of rows and, on GPUs of different models, their budgets may differ. `check` is called
    before each block, and as often on every rank as on the rank with the most blocks.
    """
    fitting = head.engine.logit_bytes // (_COPIES * 4 * max(1, len(rows.labels)))
    device, weights = head.weight.device, head.engine.weights
    fewest = -all_reduce_max(torch.tensor(-fitting, device=device), head.engine.data_group)
    at_once = max(1, int(fewest))
    num_blocks = torch.tensor(-(-(weights.stop - weights.start) // at_once), device=device)
    blocks = iter(head.score_blocks(rows.features, at_once))
    for _ in range(int(all_reduce_max(num_blocks, world.group))):
        check()
        yield from islice(blocks, 1)


def _check_numbers(nan_class: Tensor, world: World) -> None:
    class_id = int(all_reduce_max(nan_class, world.group))
    if class_id >= 0:
        raise ValueError(
            f"a score of class {class_id} is NaN: check the weights and the inputs for non-finite "
            "values"
        )


def _over_ranks(measures: list[ClassMeasures], group: ProcessGroup | None) -> ClassMeasures:
    """Return the metrics of all ranks' classes, in ascending order of class, on the CPU
    (collective).
    """
    mine = ClassMeasures.concatenate(measures)
    tensors = {
        field.name: all_rows(getattr(mine, field.name), group).cpu()
        for field in fields(mine)
        if field.name != "recalls"
    }
    return ClassMeasures.concatenate([ClassMeasures(recalls=mine.recalls, **tensors)])


def count_samples_above(
    head: ClassHead,
    rows: SplitRows,
    promises: Promises,
    *,
    world: World,
    check: Callable[[], None],
) -> Tensor:
    """For each class, count the samples whose score is at or above each of its thresholds
    (collective).

    Returns int32 counts [K, R, 2] over all groups, on the CPU: samples of the class, and samples of
    any class. Ranks other than the main one count only their own classes and return an empty tensor
    [0, R, 2]. All classes are scored again, because the thresholds are known only after the first
    pass.
    """
    device, tree, weights = rows.features.device, head.class_tree, head.engine.weights
    order, is_class = tree.class_order, tree.class_of_node >= 0
    before = int(np.count_nonzero(is_class[: weights.start]))  # classes of the preceding ranks
    num_mine = int(np.count_nonzero(is_class[weights.start : weights.stop]))
    thresholds = torch.from_numpy(promises.thresholds)
    shape = (num_mine, thresholds.shape[1], 2)
    mine, done = torch.zeros(shape, dtype=torch.int32, device=device), 0
    for block in _scored_blocks(head, rows, world, check):
        ids = block.class_ids
        own = thresholds[promises.row_of_class[ids.cpu().numpy()]].to(device)
        mine[done : done + len(ids)] = count_reached(block.scores, rows.labels, ids, own)
        done += len(ids)
    all_reduce_sum(mine, head.engine.data_group)
    counts = torch.empty((len(order) if world.is_main else 0, *shape[1:]), dtype=torch.int32)
    for start in range(0, len(order), _CLASSES_AT_ONCE):
        # The ranks hold consecutive parts of the class order. Each class is counted on one rank and
        # 0 on all others.
        stop = min(start + _CLASSES_AT_ONCE, len(order))
        part = mine.new_zeros((stop - start, *shape[1:]))
        first, last = np.clip([start, stop], before, before + num_mine).tolist()
        part[first - start : last - start] = mine[first - before : last - before]
        all_reduce_sum(part, head.engine.class_group)
        if world.is_main:
            counts[torch.from_numpy(order[start:stop].astype(np.int64))] = part.cpu()
    return counts


def count_reached(
    scores: Tensor, labels: Tensor | LabelSets, class_ids: Tensor, thresholds_CR: Tensor
) -> Tensor:
    """Return counts [C, R, 2] of the samples at or above the thresholds of the C classes of a
    block: samples of the class, and all samples. `scores` are [n, C], and `labels` are [n] or label
    sets of n rows.
    """
    _, rows, columns = positions_of_labels(labels, class_ids)
    counts = []
    for threshold_C in thresholds_CR.unbind(1):
        reaches_nC = scores >= threshold_C
        of_class = torch.bincount(columns[reaches_nC[rows, columns]], minlength=len(class_ids))
        # On a CPU, summing bytes is twice as fast as summing booleans.
        of_any = reaches_nC.view(torch.uint8).sum(0, dtype=torch.int32).long()
        counts.append(torch.stack([of_class, of_any], 1))
    return torch.stack(counts, 1)
