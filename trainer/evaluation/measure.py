"""Exact evaluation over ranks: every sample once, never samples x classes in memory.

The ranks of a class group gather the features of their rows (n x d); the groups along `data` share
the rows. Each rank walks its own classes in blocks; what the groups found is added up.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from data.loading.batch import Batch
from data.loading.loader import EvalLoader
from data.shards.manifest import Manifest
from data.shards.split import open_split
from heads import ClassHead
from heads.collectives import all_reduce_sum
from heads.similarity import similarity_accuracy
from heads.slc import ClassMeasures, pooled_thresholds
from trainer.config import EvalConfig, Recipe
from trainer.evaluation.class_scores import count_samples_above, score_classes
from trainer.evaluation.features import SplitRows, all_rows, gathered_rows
from trainer.evaluation.marginals import MarginalTopK, marginal_top, num_pieces
from trainer.evaluation.stopping import ShouldStop, StopChecks, never_stop
from trainer.task import Task
from trainer.world import World

MOST_CONFUSIONS = 1000  # pairs that an evaluation keeps


@dataclass(frozen=True)
class Evaluation:
    """`metrics` by name (means over samples or over classes), `classes` in class-list order (NaN
    where a class has no sample) and one pooled threshold [R] a recall.

    `reached_pooled` [K, R, 2] counts, for each class, the samples whose score for it reaches the
    pooled threshold: those of the class, and those of any class. `correct` [K] counts the samples
    of each class that are predicted right (top 1), `confusions` [M, 3] those of the most frequent
    wrong predictions: true class, predicted class, samples.
    """

    metrics: dict[str, float]
    classes: ClassMeasures
    pooled: Tensor
    reached_pooled: Tensor
    num_samples: int
    correct: Tensor
    confusions: Tensor


def evaluate(
    task: Task,
    batches: Iterable[Batch],
    config: EvalConfig,
    world: World,
    *,
    label_vectors: Tensor | None,
    marginal: MarginalTopK | None = None,
    progress: Callable[[int], None] = lambda samples: None,
    should_stop: ShouldStop = never_stop,
) -> Evaluation:
    """Evaluate this rank's `batches` together with those of all ranks (collective).

    With `label_vectors` [K, D] the similarity accuracy SA is measured too, with `marginal` the
    marginalised top-k accuracy over the views of each picture. `progress` hears of the samples done
    on this rank. `should_stop` is asked equally often on every rank, where all have as many
    batches, and says the same on all: then all raise EvaluationStopped.
    """
    was_training = task.training
    task.eval()
    try:
        rows = gathered_rows(
            task,
            batches,
            world,
            views_apart=marginal is not None,
            progress=progress,
            should_stop=should_stop,
        )
        return measure(
            task.head,
            rows,
            config,
            world,
            label_vectors=label_vectors,
            marginal=marginal,
            should_stop=should_stop,
        )
    finally:
        task.train(was_training)


def evaluate_split(
    task: Task,
    recipe: Recipe,
    world: World,
    *,
    label_vectors: np.ndarray | None,
    manifest: Manifest | None = None,
    progress: Callable[[int], None] = lambda samples: None,
    should_stop: ShouldStop = never_stop,
) -> Evaluation:
    """`evaluate` on the recipe's evaluation split (collective); `manifest` is that of its shards,
    if it is already loaded."""
    data = recipe.data
    with open_split(data.shards, data.eval_split, cache=data.cache, manifest=manifest) as split:
        loader = EvalLoader(
            split,
            recipe.data,
            batch=recipe.evaluation.batch,
            rank=world.rank,
            world_size=world.size,
            device=world.device,
        )
        config = recipe.evaluation
        marginal = None
        if config.marginal_topk:
            marginal = MarginalTopK(config.marginal_topk, config.marginal_temperature)
        return evaluate(
            task,
            loader,
            config,
            world,
            marginal=marginal,
            label_vectors=None if label_vectors is None else torch.from_numpy(label_vectors),
            progress=progress,
            should_stop=should_stop,
        )


def measure(
    head: ClassHead,
    rows: SplitRows,
    config: EvalConfig,
    world: World,
    *,
    label_vectors: Tensor | None = None,
    marginal: MarginalTopK | None = None,
    should_stop: ShouldStop = never_stop,
) -> Evaluation:
    """All measures of `rows`, which each class group has of its own (collective).

    Held at one time: the rows' features, n x d; the head's memory budget of scores; a few numbers a
    class and a row. Raises ValueError on every rank where labels are outside the classes, there is
    no sample or a score is NaN.
    """
    num_classes, data_group = head.num_classes, head.engine.data_group
    labels = rows.labels
    positives = _class_counts(labels, num_classes, data_group)
    num_samples = int(positives.sum())
    if num_samples == 0:
        raise ValueError("the split has no sample: there is nothing to evaluate")
    scores = score_classes(
        head,
        rows,
        positives,
        k=min(num_classes, max([*config.topk, *(marginal.ks if marginal else ())])),
        recalls=config.recalls,
        world=world,
        should_stop=should_stop,
    )
    right = scores.predicted == labels.unsqueeze(1)
    metrics = {f"top{k}": _share(right[:, :k].any(1), num_samples, data_group) for k in config.topk}
    if marginal is not None:
        for k in marginal.ks:
            stop_checks = StopChecks(num_pieces(rows), should_stop, world)
            best = _marginal_best(head, rows, k, marginal, scores.predicted, stop_checks)
            stop_checks.check_remaining()
            hits = (best == labels.unsqueeze(1)).any(1)
            metrics[f"marginal_top{k}"] = _share(hits, num_samples, data_group)
    first = scores.predicted[:, 0]
    if label_vectors is not None:
        sa = similarity_accuracy(label_vectors, labels, first, group=data_group)
        metrics["sa"] = float(sa)
    metrics |= scores.classes.summary()
    pooled = pooled_thresholds(all_rows(scores.true_scores, data_group), config.recalls).cpu()
    return Evaluation(
        metrics,
        scores.classes,
        pooled,
        count_samples_above(head, rows, pooled, world=world, should_stop=should_stop),
        num_samples,
        _class_counts(labels[right[:, 0]], num_classes, data_group).cpu(),
        most_confused(labels, first, num_classes, data_group).cpu(),
    )


def _class_counts(labels: Tensor, num_classes: int, group: ProcessGroup | None) -> Tensor:
    """Samples of each class [K] on all ranks of `group`; ValueError on all of them for a label that
    is no class (collective)."""
    outside = (labels < 0) | (labels >= num_classes)
    num_outside = int(all_reduce_sum(outside.sum(), group))
    if num_outside:
        raise ValueError(
            f"{num_outside} labels of the split are outside 0..{num_classes - 1}: the shards and "
            "the model disagree on the classes"
        )
    return all_reduce_sum(torch.bincount(labels, minlength=num_classes), group)


def _share(hits: Tensor, num_samples: int, group: ProcessGroup | None) -> float:
    """Of all ranks' samples those that are hit (collective)."""
    return int(all_reduce_sum(hits.sum(), group)) / num_samples


def _marginal_best(
    head: ClassHead,
    rows: SplitRows,
    k: int,
    by: MarginalTopK,
    predicted: Tensor,
    stop_checks: StopChecks,
) -> Tensor:
    """The k classes [n, k] that the views' marginals predict."""
    # Of one view they are those of the highest scores; and k may be all classes.
    if rows.features.shape[1] == 1 or k >= head.num_classes or not len(predicted):
        return predicted[:, :k]
    return marginal_top(head, rows, k, by.temperature, stop_checks.check)


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
    pairs, positions = pairs.unique(return_inverse=True)
    totals = torch.zeros_like(pairs).index_add_(0, positions, counts)
    order = totals.argsort(descending=True, stable=True)[:MOST_CONFUSIONS]
    pairs = pairs[order]
    return torch.stack([pairs // num_classes, pairs % num_classes, totals[order]], dim=1)
