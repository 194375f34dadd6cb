"""Exact evaluation over ranks: every sample once, never samples x classes in memory.

Features of the whole split are gathered once (N x d); then each rank walks its own classes in
blocks for the top-k and the single-logit measures.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from data import Batch, EvalLoader, open_split
from heads.collectives import all_gather_equal, all_gather_rows, all_reduce_sum
from heads.largest import largest_columns, sort_largest
from heads.similarity import similarity_accuracy
from heads.slc import ClassMeasures, block_measures, pooled_thresholds
from trainer.config import EvalConfig, Recipe
from trainer.task import Task
from trainer.world import World


@dataclass(frozen=True)
class Evaluation:
    """`metrics` by name (means over samples or over classes), `classes` in class-list order (NaN
    where a class has no sample) and one pooled threshold [R] a recall."""

    metrics: dict[str, float]
    classes: ClassMeasures
    pooled: Tensor
    num_samples: int


def evaluate(
    task: Task,
    batches: Iterable[Batch],
    config: EvalConfig,
    world: World,
    *,
    label_vectors: Tensor | None,
    progress: Callable[[int], None] = lambda samples: None,
) -> Evaluation:
    """Evaluate this rank's `batches` together with those of all ranks (collective).

    With `label_vectors` [K, D] the similarity accuracy SA is measured too. `progress` hears of the
    samples done on this rank.
    """
    was_training = task.training
    task.eval()
    features, labels = _gathered_features(task, batches, world, progress)
    group = task.head.engine.class_group
    top = _TopK(max(config.topk), len(labels), world.device)
    true_scores = torch.zeros(len(labels), device=world.device)
    nothing = block_measures(features[:, :0], labels, labels[:0], config.recalls)
    measures = [nothing]  # a rank may have no class
    for block in task.head.score_blocks(features, _classes_at_once(task, len(labels))):
        top.add(block.scores, block.class_ids)
        measures.append(block_measures(block.scores, labels, block.class_ids, config.recalls))
        own = labels.unsqueeze(1) == block.class_ids
        true_scores += torch.where(own, block.scores, 0).sum(1)
    predicted = top.over_ranks(group)
    classes = _over_ranks(measures, group)
    metrics = {
        f"top{k}": float((predicted[:, :k] == labels.unsqueeze(1)).any(1).double().mean())
        for k in config.topk
    }
    if label_vectors is not None:
        vectors = label_vectors.to(world.device)
        metrics["sa"] = float(similarity_accuracy(vectors, labels, predicted[:, 0]))
    metrics |= classes.summary()
    pooled = pooled_thresholds(all_reduce_sum(true_scores, group), config.recalls)
    task.train(was_training)
    return Evaluation(metrics, classes, pooled.cpu(), len(labels))


def evaluate_split(
    task: Task,
    recipe: Recipe,
    world: World,
    *,
    label_vectors: np.ndarray | None,
    progress: Callable[[int], None] = lambda samples: None,
) -> Evaluation:
    """`evaluate` on the recipe's evaluation split (collective)."""
    data = recipe.data
    with open_split(data.shards, data.eval_split, cache=data.cache) as split:
        loader = EvalLoader(
            split,
            recipe.data,
            batch=recipe.evaluation.batch,
            rank=world.rank,
            world_size=world.size,
            device=world.device,
        )
        vectors = None if label_vectors is None else torch.from_numpy(label_vectors)
        return evaluate(
            task, loader, recipe.evaluation, world, label_vectors=vectors, progress=progress
        )


def save_evaluation(folder: Path, evaluation: Evaluation, *, step: int) -> None:
    """Write `step-….json` (metrics) and `step-….safetensors` (per class) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    classes = evaluation.classes
    tensors = {
        "positives": classes.positives,
        "average_precision": classes.average_precision,
        "precision_at": classes.precision_at,
        "threshold": classes.threshold,
        "pooled": evaluation.pooled,
        "recalls": torch.tensor(classes.recalls, dtype=torch.float64),
    }
    path = folder / f"step-{step:08d}.safetensors"
    aside = path.with_suffix(".partial")
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, aside)
    aside.rename(path)
    summary = {"step": step, "samples": evaluation.num_samples, **evaluation.metrics}
    aside.write_text(json.dumps(summary, indent=1), encoding="utf-8")
    aside.rename(path.with_suffix(".json"))


def load_evaluation(folder: Path, *, step: int) -> Evaluation:
    """What `save_evaluation` wrote; FileNotFoundError names the remedy where there is none."""
    path = folder / f"step-{step:08d}.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: run `kway eval` on the run first")
    try:
        tensors = load_file(path)
        summary = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        classes = ClassMeasures(
            class_ids=torch.arange(len(tensors["positives"])),
            recalls=tuple(tensors.pop("recalls").tolist()),
            **{name: tensors[name] for name in tensors if name != "pooled"},
        )
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): run `kway eval` again") from error
    metrics = {name: value for name, value in summary.items() if name not in ("step", "samples")}
    return Evaluation(metrics, classes, tensors["pooled"], summary["samples"])


class _TopK:
    """The k highest scores of each row over the blocks seen; ties go to the lowest class id."""

    def __init__(self, k: int, num_rows: int, device: torch.device) -> None:
        self.k = k
        self.scores = torch.empty(num_rows, 0, device=device)
        self.class_ids = torch.empty(num_rows, 0, dtype=torch.int64, device=device)

    def add(self, scores_NC: Tensor, class_ids_C: Tensor) -> None:
        """Take in a block of classes."""
        best = largest_columns(scores_NC, class_ids_C, self.k)
        self.scores = torch.cat([self.scores, scores_NC.gather(1, best)], dim=1)
        self.class_ids = torch.cat([self.class_ids, class_ids_C[best]], dim=1)
        self._sort()

    def over_ranks(self, group: ProcessGroup | None) -> Tensor:
        """Class ids [N, min(k, K)] over all ranks' classes, best first (collective)."""
        width = torch.tensor([self.scores.shape[1]], device=self.scores.device)
        widths = torch.cat(all_gather_equal(width, group)).tolist()
        self.scores = all_gather_rows(self.scores.T.contiguous(), widths, group).T
        self.class_ids = all_gather_rows(self.class_ids.T.contiguous(), widths, group).T
        self._sort()
        return self.class_ids

    def _sort(self) -> None:
        self.scores, self.class_ids = sort_largest(self.scores, self.class_ids, self.k)


def _gathered_features(
    task: Task, batches: Iterable[Batch], world: World, progress: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """Features [N, d] and labels [N] of the whole split, in its order, on every rank."""
    features = [torch.empty(0, task.head.dim, device=world.device)]
    labels = [torch.empty(0, dtype=torch.int64, device=world.device)]
    for batch in batches:
        if len(batch.labels):
            features.append(task.features(batch.inputs))
            labels.append(batch.labels.to(world.device))
            progress(len(batch.labels))
    mine = torch.cat(features), torch.cat(labels)
    count = torch.tensor([len(mine[1])], device=world.device)
    sizes = torch.cat(all_gather_equal(count, world.group)).tolist()
    return all_gather_rows(mine[0], sizes, world.group), all_gather_rows(
        mine[1], sizes, world.group
    )


def _over_ranks(measures: list[ClassMeasures], group: ProcessGroup | None) -> ClassMeasures:
    """The measures of all ranks' classes in class-list order, on the CPU (collective)."""
    mine = ClassMeasures.concatenate(measures)
    count = torch.tensor([len(mine.class_ids)], device=mine.class_ids.device)
    sizes = torch.cat(all_gather_equal(count, group)).tolist()
    fields = {
        field.name: all_gather_rows(getattr(mine, field.name), sizes, group).cpu()
        for field in dataclasses.fields(mine)
        if field.name != "recalls"
    }
    return ClassMeasures.concatenate([ClassMeasures(recalls=mine.recalls, **fields)])


def _classes_at_once(task: Task, num_samples: int) -> int:
    """Classes whose scores for all samples, thrice, fit the head's memory budget."""
    return max(1, task.head.engine.memory_bytes // (3 * 4 * max(1, num_samples)))
