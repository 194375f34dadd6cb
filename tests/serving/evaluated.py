"""Runs, their bundles and what their evaluation decides about each sample of the validation set."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from data.loading.loader import EvalLoader
from data.shards.split import open_split
from tests.ranks import rank_world
from trainer.bundle.export import export_run
from trainer.config import Recipe
from trainer.evaluation import load_evaluation
from trainer.evaluation.class_scores import gathered_rows
from trainer.run.folder import RunFolder
from trainer.run.trained_run import TrainedRun, open_trained
from trainer.train import train

RECALL = 0.9

Scores = NDArray[np.float32]
Decisions = NDArray[np.bool_]


@dataclass(frozen=True)
class Evaluated:
    """The validation set and its evaluation results: `inputs` (image files or texts) [N], `names`
    [K], `scores` [N, K], `thresholds` [K] for the recall, and `decisions` [N, K].
    """

    bundle: Path
    inputs: list[bytes | str]
    names: list[str]
    scores: Scores
    thresholds: Scores

    @property
    def decisions(self) -> Decisions:
        return self.scores >= self.thresholds


def evaluated(recipe: Recipe, bundle: Path) -> Evaluated:
    """Train a run, export it as `bundle` and evaluate it."""
    train(recipe, rank_world())
    export_run(recipe.run, bundle, rank_world())
    trained = open_trained(recipe.run, rank_world())
    saved = load_evaluation(RunFolder(recipe.run).evaluations, step=trained.step)
    thresholds = saved.promises.by_class().thresholds[:, saved.promises.recalls.index(RECALL)]
    with open_split(recipe.data.shards, recipe.data.eval_split) as split:
        order = np.arange(len(split))
        if recipe.data.text is None:
            inputs: list[bytes | str] = [split.read(int(index))[0] for index in order]
        else:  # the evaluation reads texts in order of their length
            order = order[np.argsort(split.sizes(order), kind="stable")]
            inputs = [split.read(int(index))[0].decode() for index in order]
    names = list(trained.data.manifest.class_names)
    return Evaluated(bundle, inputs, names, _scores_of(trained), np.asarray(thresholds))


def _scores_of(trained: TrainedRun) -> Scores:
    """Compute scores [N, K] with the functions of the evaluation."""
    recipe, world, head = trained.recipe, rank_world(), trained.task.head
    with open_split(recipe.data.shards, recipe.data.eval_split) as split, torch.no_grad():
        loader = EvalLoader(split, recipe.data, batch=recipe.evaluation.batch)
        rows = gathered_rows(trained.task, loader, world)
        (block,) = head.score_blocks(rows.features, head.num_classes)
    scores: Scores = block.scores[:, block.class_ids.argsort()].numpy()
    return scores
