"""Exact distributed evaluation: every sample counts once, and the full matrix of samples x classes
is never in memory.

Each class group (a position along the `data` axis) evaluates a part of the rows. The ranks of the
group gather the features of these rows (n x d), and each rank scores its own classes in blocks. The
counts are then summed over the groups.
"""

from collections.abc import Callable
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
from heads import ClassHead
from heads.collectives import all_reduce_sum
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
    frequent wrong predictions: true class, predicted class, number of samples.
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
    manifest: Manifest | None = None,
    progress: Report = lambda done, total: None,
    check: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluate the recipe's evaluation split (collective). Pass the `manifest` of the shards if it
    is already loaded.

    `label_vectors` [K, D] adds the similarity accuracy SA. `progress` is called on rank 0 after
    each batch, for all ranks, which evaluate about the same number of samples. `check` is called
    the same number of times on every rank; to stop the evaluation, it must raise an error in the
    same call on all of them.
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
    check: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Compute all metrics. Each class group passes its own `rows` (collective).

    Keeps in memory the features of the rows (n x d), scores within the head's memory budget, a few
    numbers per row, and one number per class; in addition, the counts of the rank's own classes,
    and on the main rank those of all classes. Raises ValueError on every rank if a label is out of
    range, there are no samples, or a score is NaN.
    """
    num_classes, data_group = head.num_classes, head.engine.data_group
    labels, all_labels = rows.labels, all_rows(rows.labels, data_group)
    num_samples = len(all_labels)
    if num_samples == 0:
        raise ValueError("the split is empty: choose an evaluation split with samples")
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
    correct = scores.predicted == labels.unsqueeze(1)
    metrics = {
        f"top{k}": int(all_reduce_sum(correct[:, :k].any(1).sum(), data_group)) / num_samples
        for k in config.topk
    }
    first = scores.predicted[:, 0]
    if label_vectors is not None:
        sa = similarity_accuracy(label_vectors, labels, first, group=data_group)
        metrics["sa"] = float(sa)
    metrics |= scores.classes.summary()
    promises = make_promises(
        all_rows(scores.true_scores, data_group).cpu().numpy(),
        all_labels.cpu().numpy(),
        groups_of_head(head),
        config.recalls,
        config.confidence,
    )
    correct_classes = torch.searchsorted(measured, labels[correct[:, 0]])
    num_correct = torch.bincount(correct_classes, minlength=len(measured))
    return Evaluation(
        metrics,
        scores.classes,
        promises,
        count_samples_above(head, rows, promises, world=world, check=check),
        num_samples,
        all_reduce_sum(num_correct, data_group).cpu(),
        most_confused(labels, first, num_classes, data_group).cpu(),
    )


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
