"""A job that runs kway's trainer with a recipe and returns its evaluations."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.papers.job import Folders, Job, Measures
from experiments.papers.shards import Dataset, shards_of

if TYPE_CHECKING:
    from trainer.config import BestConfig, Recipe


def training(dataset: Dataset, recipe: Mapping[str, Any], *, also: Sequence[str] = ()) -> Job:
    """Return a job that trains `recipe` on `dataset`, whose shards must exist when it runs.

    `recipe` is a dictionary without `run` and `data.shards`. `also`: splits to evaluate in addition
    to `data.eval_split`.

    The measures are those of the evaluation, plus the measures of each split in `also` under its
    name. If the recipe keeps the best checkpoint, `best` contains its step and the measures of the
    splits in `also` at that step. If a loss or gradient is not finite, `diverged` is the only
    measure.
    """
    settings = {"dataset": asdict(dataset), "recipe": recipe, "also": list(also)}
    return Job("training:run_recipe", settings)


def run_recipe(settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Train and evaluate (the job that `training` returns). Resumes from the last checkpoint."""
    from experiments.networks import register_networks
    from trainer.process.signals import Preempted
    from trainer.recipe import build_recipe
    from trainer.train import train
    from trainer.world import open_world

    register_networks()
    run = folders.work / "run"
    dataset = Dataset(**settings["dataset"])
    tree = dict(settings["recipe"])
    data = {**tree.get("data", {}), "shards": str(shards_of(dataset, folders))}
    tree |= {"run": str(run), "data": data}
    recipe = build_recipe(tree, origin="an experiment's recipe")
    log = folders.work / "log.txt"
    with log.open("a") as output, redirect_stdout(output), redirect_stderr(output):
        try:
            with open_world(recipe.train.device) as world:
                train(recipe, world)
                return _measures(recipe, settings, world)
        except FloatingPointError as error:
            return {"diverged": str(error)}
        except Preempted as stopped:
            os._exit(stopped.exit_code)  # the checkpoint is written; the pool is shutting down


def _measures(recipe: "Recipe", settings: Mapping[str, Any], world: Any) -> Measures:
    from trainer.run.folder import RunFolder

    run, also = recipe.run, settings["also"]
    evaluations = RunFolder(run).evaluations
    measures = _evaluation(max(evaluations.glob("step-*.json")))
    measures |= {split: _evaluated(run, split, None, world) for split in also}
    if (criterion := recipe.checkpoint.keep_best) is not None:
        step = _best_step(evaluations, criterion)
        of_splits = {split: _evaluated(run, split, step, world) for split in also}
        measures["best"] = {"step": step, **of_splits}
    return measures


def _evaluated(run: Path, split: str, step: int | None, world: Any) -> Measures:
    """Evaluate the checkpoint of `step`, or the newest one if `step` is None."""
    from trainer.evaluation.request import EvaluationRequest, evaluate_run

    request = EvaluationRequest(run, checkpoint=step, split=split)
    evaluated_step = evaluate_run(request, world)
    return _evaluation(request.folder() / f"step-{evaluated_step:08d}.json")


def _best_step(evaluations: Path, criterion: "BestConfig") -> int:
    """Return the first of the best steps, which is the one whose checkpoint the trainer keeps."""
    found = [_evaluation(path) for path in sorted(evaluations.glob("step-*.json"))]
    sign = 1 if criterion.mode == "max" else -1
    best = max(found, key=lambda one: sign * float(one[criterion.measure]))
    return int(best["step"])


def _evaluation(path: Path) -> Measures:
    measures: Measures = json.loads(path.read_text(encoding="utf-8"))
    return measures
