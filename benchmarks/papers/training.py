"""A job that is a run of the ordinary trainer: a recipe in, its evaluations out."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.papers.job import Job, Measures, Places
from benchmarks.papers.shards import Dataset, shards_of, tokenizer_of

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config import BestConfig, Recipe
    from trainer.task import Task

_CURVE_POINTS = 100
# As a recipe's tokenizer: the one that was learned from the dataset's own texts.
MADE = "made"


def training(
    dataset: Dataset, recipe: Mapping[str, Any], *, also: Sequence[str] = (), logits: bool = False
) -> Job:
    """A run of `recipe` (a recipe's tree, without `run` and `data.shards`) on `dataset`, whose
    shards are made before. `also`: splits evaluated beside `data.eval_split`; `logits`: measures
    of log-probabilities, which need all logits, beside those of single logits.

    It measures what an evaluation does, `also` under the split's name, the SLC measures of all
    logits under `all_logits`, `curve` (steps and training losses), and `diverged` where a loss or
    gradient was not finite and there is nothing else. Where the recipe keeps the best checkpoint,
    `best` has its step and what `also` are at it.
    """
    settings = {
        "dataset": asdict(dataset),
        "recipe": recipe,
        "also": list(also),
        "logits": logits,
    }
    return Job("training:run_recipe", settings)


def run_recipe(settings: Mapping[str, Any], places: Places) -> Measures:
    """The job of `training`. A run that was cut off goes on from its last checkpoint."""
    from trainer.process.signals import Preempted
    from trainer.recipe import build_recipe
    from trainer.train import train
    from trainer.world import open_world

    run = places.work / "run"
    dataset = Dataset(**settings["dataset"])
    tree = dict(settings["recipe"])
    data = {**tree.get("data", {}), "shards": str(shards_of(dataset, places))}
    if data.get("text", {}).get("tokenizer") == MADE:
        data["text"] = {**data["text"], "tokenizer": str(tokenizer_of(dataset, places))}
    tree |= {"run": str(run), "data": data}
    recipe = build_recipe(tree, origin="an experiment's recipe")
    log = places.work / "log.txt"
    with log.open("a") as said, redirect_stdout(said), redirect_stderr(said):
        try:
            with open_world(recipe.train.device) as world:
                train(recipe, world)
                return _measures(recipe, settings, world)
        except FloatingPointError as error:
            return {"diverged": str(error)}
        except Preempted as stopped:
            os._exit(stopped.exit_code)  # the checkpoint is written; the pool is being ended


def _measures(recipe: "Recipe", settings: Mapping[str, Any], world: Any) -> Measures:
    from trainer.run.folder import RunFolder

    run, also = recipe.run, settings["also"]
    evaluations = RunFolder(run).evaluations
    measures = _evaluation(max(evaluations.glob("step-*.json")))
    measures |= {split: _evaluated(run, split, None, world) for split in also}
    if (kept := recipe.checkpoint.keep_best) is not None:
        step = _best_step(evaluations, kept)
        of_splits = {split: _evaluated(run, split, step, world) for split in also}
        measures["best"] = {"step": step, **of_splits}
    if settings["logits"]:
        measures["all_logits"] = _slc_of_probabilities(run, world)
    return {**measures, "curve": _curve(run / "metrics.jsonl")}


def _evaluated(run: Path, split: str, step: int | None, world: Any) -> Measures:
    """At the checkpoint of a step; None: the newest one."""
    from trainer.evaluation.run_evaluation import EvaluationRequest, evaluate_run

    wanted = EvaluationRequest(run, checkpoint=step, split=split)
    at = evaluate_run(wanted, world)
    return _evaluation(wanted.folder() / f"step-{at:08d}.json")


def _best_step(evaluations: Path, kept: "BestConfig") -> int:
    """The first of equals, whose checkpoint the trainer keeps."""
    found = [_evaluation(path) for path in sorted(evaluations.glob("step-*.json"))]
    sign = 1 if kept.mode == "max" else -1
    best = max(found, key=lambda one: sign * float(one[kept.measure]))
    return int(best["step"])


def _evaluation(path: Path) -> Measures:
    measures: Measures = json.loads(path.read_text(encoding="utf-8"))
    return measures


def _curve(log: Path) -> Measures:
    lines = (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines())
    steps = [(line["step"], line["loss"]) for line in lines if line["event"] == "step"]
    chosen = np.unique(np.linspace(0, len(steps) - 1, _CURVE_POINTS).round().astype(int))
    return {
        "steps": [steps[place][0] for place in chosen],
        "losses": [steps[place][1] for place in chosen],
    }


def _slc_of_probabilities(run: Path, world: Any) -> Measures:
    """Measures of log p_j instead of z_j, as paper 002 has them in Table 2."""
    from heads.slc import block_measures
    from trainer.run.trained_run import open_trained

    trained = open_trained(run, world)
    logits, labels, ids = evaluated_logits(trained.recipe, trained.task, world)
    recalls = trained.recipe.evaluation.recalls
    return block_measures(logits.log_softmax(1), labels, ids, recalls).summary()


def evaluated_logits(
    recipe: "Recipe", task: "Task", world: Any
) -> tuple["Tensor", "Tensor", "Tensor"]:
    """All logits [N, K] of the recipe's evaluation split, labels [N], and the columns' classes."""
    import torch

    from data.loading.loader import EvalLoader
    from trainer.evaluation.features import gathered_rows
    from trainer.evaluation.run_evaluation import open_evaluation_split
    from trainer.evaluation.stopping import never_stop

    with open_evaluation_split(recipe) as split:
        loader = EvalLoader(
            split,
            recipe.data,
            batch=recipe.evaluation.batch,
            rank=0,
            world_size=1,
            device=world.device,
        )
        rows = gathered_rows(
            task,
            loader,
            world,
            separate_views=False,
            progress=lambda samples: None,
            should_stop=never_stop,
        )
    features, blocks = rows.features.flatten(1), list(task.head.class_rows())
    logits = torch.cat([task.head.logits(features, block) for block in blocks], dim=1)
    return logits, rows.labels, torch.cat([block.class_ids for block in blocks])
