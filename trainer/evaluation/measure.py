"""Exact distributed evaluation: every sample counts once, and the full matrix of samples x classes
is never in memory.

Each class group (a position along the `data` axis) evaluates a part of the rows. The ranks of the
group gather the features of these rows (n x d), and each rank scores its own classes in blocks. The
counts are then summed over the groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from data.loading.loader import EvalLoader
from data.progress import Report
from data.shards.manifest import Manifest
from data.shards.mixture import load_manifest
from data.shards.split import open_split
from heads import ClassHead, LabelSets
from heads.collectives import all_reduce_sum
from heads.label_sets import class_ids_of
from heads.set_measures import f1_measures, measures_at_k
from heads.similarity import similarity_accuracy
from heads.slc import ClassMeasures
from trainer.config import EvalConfig, Recipe
from trainer.evaluation.class_scores import (
    SplitRows,
    all_rows,
    count_samples_above,
    gathered_rows,
    score_classes,
)
from trainer.promises import Promises, groups_of_head, make_promises
from trainer.task import Task
from trainer.world import World

MOST_CONFUSIONS = 1000  # maximum number of pairs in an evaluation


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    `metrics` are means over samples or classes, by name. `classes` contains the metrics of the P
    classes with samples, in ascending order of class ID, and `correct` [P] counts their correct
    top-1 predictions. `promises` are the thresholds of all classes. `reached` [K, R, 2] counts, for
    each class, the samples whose score for it reaches its threshold: samples of the class, and
    samples of any class. Only the main rank has these counts. `confusions` [M, 3] lists the most
    frequent wrong predictions: true class, predicted class, number of samples. With label sets, a
    sample is one of each class in its set, and M is 0, because a wrong prediction does not have a
    single true class.
    """

    metrics: dict[str, float]
    classes: ClassMeasures
    promises: Promises
    reached: Tensor
    num_samples: int
    correct: Tensor
    confusions: Tensor


def evaluate_split(
    task: Task,
    recipe: Recipe,
    world: World,
    *,
    label_vectors: np.ndarray | None,
    inverse_propensities: Tensor | None = None,
    manifest: Manifest | None = None,
    progress: Report = lambda done, total: None,
    check: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluate the recipe's evaluation split (collective). Pass the `manifest` of the shards if it
    is already loaded.

    `label_vectors` [K, D] add the similarity accuracy SA, except with label sets;
    `inverse_propensities` [K] add PSP with label sets. `progress` is called on rank 0 after each
    batch, for all ranks, which evaluate about the same number of samples. `check` is called the
    same number of times on every rank; to stop the evaluation, it must raise an error in the same
    call on all of them.
    """
    data, config, was_training = recipe.data, recipe.evaluation, task.training
    manifest = manifest or load_manifest(data)
    task.eval()
    try:
        with open_split(data.shards, data.eval_split, cache=data.cache, manifest=manifest) as split:
            loader = EvalLoader(
                split,
                data,
                batch=config.batch,
                rank=world.rank,
                world_size=world.size,
                device=world.device,
            )
            total, done = len(split), 0

            def advance(samples: int) -> None:
                nonlocal done
                done = min(total, done + samples * world.size)
                if world.is_main:
                    progress(done, total)

            rows = gathered_rows(task, loader, world, progress=advance, check=check)
        return measure(
            task.head,
            rows,
            config,
            world,
            label_vectors=None if label_vectors is None else torch.from_numpy(label_vectors),
            inverse_propensities=inverse_propensities,
            check=check,
        )
    finally:
        task.train(was_training)


def measure(
    head: ClassHead,
    rows: SplitRows,
    config: EvalConfig,
    world: World,
    *,
    label_vectors: Tensor | None = None,
    inverse_propensities: Tensor | None = None,
    check: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Compute all metrics. Each class group passes its own `rows` (collective).

    Keeps in memory the features of the rows (n x d), scores within the head's memory budget, a few
    numbers per row, and one number per class; in addition, the counts of the rank's own classes,
    and on the main rank those of all classes. Raises ValueError on every rank if a label is out of
    range, there are no samples, or a score is NaN.
    """
    num_classes, data_group = head.num_classes, head.engine.data_group
    labels, all_labels = rows.labels, all_rows(class_ids_of(rows.labels), data_group)
    num_rows = torch.tensor(len(labels), device=rows.features.device)
    num_samples = int(all_reduce_sum(num_rows, data_group))
    if num_samples == 0:
        raise ValueError("the split is empty: choose an evaluation split with samples")
    if len(all_labels) == 0:
        raise ValueError("no sample of the split has a label: choose another evaluation split")
    if num_outside := int(((all_labels < 0) | (all_labels >= num_classes)).sum()):
        raise ValueError(
            f"{num_outside} labels of the split are out of range 0 … {num_classes - 1}: the shards "
            "do not match the model's classes"
        )
    measured = all_labels.unique()
    scores = score_classes(
        head,
        rows,
        measured,
        k=min(num_classes, max(config.topk)),
        recalls=config.recalls,
        world=world,
        check=check,
    )
    first = scores.predicted[:, 0]
    if isinstance(labels, LabelSets):
        metrics = _measures_at(config.topk, scores.predicted, labels, inverse_propensities, head)
        is_correct = labels.contain(first.unsqueeze(1)).squeeze(1)
        confusions = torch.empty(0, 3, dtype=torch.int64)
    else:
        correct = scores.predicted == labels.unsqueeze(1)
        metrics = {
            f"top{k}": int(all_reduce_sum(correct[:, :k].any(1).sum(), data_group)) / num_samples
            for k in config.topk
        }
        if label_vectors is not None:
            sa = similarity_accuracy(label_vectors, labels, first, group=data_group)
            metrics["sa"] = float(sa)
        is_correct = correct[:, 0]
        confusions = most_confused(labels, first, num_classes, data_group).cpu()
    metrics |= scores.classes.summary()
    promises = make_promises(
        all_rows(scores.true_scores, data_group).cpu().numpy(),
        all_labels.cpu().numpy(),
        groups_of_head(head),
        config.recalls,
        config.confidence,
    )
    correct_classes = torch.searchsorted(measured, first[is_correct])
    num_correct = torch.bincount(correct_classes, minlength=len(measured))
    reached = count_samples_above(head, rows, promises, world=world, check=check)
    if isinstance(labels, LabelSets):
        metrics |= _f1_at_thresholds(reached, all_labels, config, world)
    return Evaluation(
        metrics,
        scores.classes,
        promises,
        reached,
        num_samples,
        all_reduce_sum(num_correct, data_group).cpu(),
        confusions,
    )


def _measures_at(
    topk: Sequence[int],
    predicted: Tensor,
    sets: LabelSets,
    inverse_propensities: Tensor | None,
    head: ClassHead,
) -> dict[str, float]:
    """Return the measures of label sets at each k (collective)."""
    if inverse_propensities is not None:
        inverse_propensities = inverse_propensities.to(predicted.device)
    found = measures_at_k(predicted, sets, inverse_propensities, group=head.engine.data_group)
    return {
        f"{name}_at_{k}": float(at_k[min(k, len(at_k)) - 1])
        for name, at_k in found.items()
        for k in topk
    }


def _f1_at_thresholds(
    reached: Tensor, all_labels: Tensor, config: EvalConfig, world: World
) -> dict[str, float]:
    """Return F1 at the thresholds for each recall. The main rank passes the counts of all classes
    (collective)."""
    found = torch.zeros(len(config.recalls), 2, dtype=torch.float64)
    if world.is_main:
        positives = torch.bincount(all_labels.cpu(), minlength=len(reached))
        for column, (hits, predicted) in enumerate(reached.permute(1, 2, 0)):
            found[column] = f1_measures(hits, predicted, positives)
    all_reduce_sum(found, world.group)
    return {
        f"{name}_f1_at_recall_{recall:g}": value
        for recall, of_recall in zip(config.recalls, found.tolist(), strict=True)
        for name, value in zip(("micro", "macro"), of_recall, strict=True)
    }


def most_confused(
    labels: Tensor, predicted: Tensor, num_classes: int, group: ProcessGroup | None
) -> Tensor:
    """Return the `MOST_CONFUSIONS` most frequent wrong predictions, int64 [M, 3]: true class,
    predicted class, number of samples.

    `labels` [n] and `predicted` [n] belong to this rank's rows; counts cover all ranks of `group`
    (collective). Ties are broken by class ID.
    """
    wrong = labels != predicted
    pairs, counts = (labels[wrong] * num_classes + predicted[wrong]).unique(return_counts=True)
    # Each rank sends every pair once with its count, so it never sends more pairs than it has
    # samples.
    pairs, counts = all_rows(pairs, group), all_rows(counts, group)
    pairs, positions = pairs.unique(return_inverse=True)
    totals = torch.zeros_like(pairs).index_add_(0, positions, counts)
    order = totals.argsort(descending=True, stable=True)[:MOST_CONFUSIONS]
    pairs = pairs[order]
    return torch.stack([pairs // num_classes, pairs % num_classes, totals[order]], dim=1)
