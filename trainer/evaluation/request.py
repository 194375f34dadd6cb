"""An evaluation of a run's checkpoint on a split, with optional settings."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from data.progress import Report
from trainer.config import Recipe
from trainer.evaluation.measure import evaluate_split
from trainer.evaluation.saved import save_evaluation
from trainer.run.folder import RunFolder, flat_settings
from trainer.run.trained_run import open_trained
from trainer.world import World

_SETTINGS = ("data.image.crops", "data.image.resize", "data.workers")
_MAX_NAME = 255  # bytes, the limit of Linux
# Settings that do not affect the result.
_IRRELEVANT = ("evaluation.batch", "data.workers", "data.eval_split")


@dataclass(frozen=True)
class EvaluationRequest:
    """A request to evaluate a run.

    `checkpoint` is a step; by default, the newest checkpoint is used. `split` defaults to the
    recipe's evaluation split. `settings` (key=value) override the recipe. Only import paths in
    `allow_imports` are imported.
    """

    run: Path
    checkpoint: int | None = None
    split: str | None = None
    settings: tuple[str, ...] = ()
    allow_imports: tuple[str, ...] = ()

    def recipe(self) -> Recipe:
        """Return the run's recipe with `settings` applied. Raises ValueError for a setting that
        does not apply to an evaluation."""
        for setting in self.settings:
            key = setting.partition("=")[0]
            if not key.startswith("evaluation.") and key not in _SETTINGS:
                raise ValueError(
                    f"--set {setting} does not apply to an evaluation: use evaluation.* or "
                    f"{', '.join(_SETTINGS)}"
                )
        split = [] if self.split is None else [f"data.eval_split={self.split}"]
        return RunFolder(self.run).load_recipe(
            [*split, *self.settings], allow_imports=self.allow_imports
        )

    def folder(self) -> Path:
        """Return the folder for the results. Results for a different split or different settings
        are saved in a separate folder, so that they do not replace the results that `kway export`
        uses. Raises ValueError if the settings are too long for its name.
        """
        run_folder, recipe = RunFolder(self.run), self.recipe()
        own = run_folder.load_recipe(allow_imports=self.allow_imports)
        before = flat_settings(own.model_dump(mode="json"))
        others = [
            f"{key}={json.dumps(value, separators=(',', ':'))}"
            for key, value in sorted(flat_settings(recipe.model_dump(mode="json")).items())
            if key not in _IRRELEVANT and (key not in before or before[key] != value)
        ]
        if recipe.data.eval_split == own.data.eval_split and not others:
            return run_folder.evaluations
        name = ",".join([recipe.data.eval_split, *others])
        if len(os.fsencode(name)) > _MAX_NAME:
            raise ValueError(
                "--set: the changed settings do not fit into the name of a folder of at most "
                f"{_MAX_NAME} bytes: change fewer settings, or shorten a list"
            )
        return run_folder.evaluations / name


def evaluate_run(
    request: EvaluationRequest,
    world: World,
    *,
    progress: Report = lambda done, total: None,
) -> int:
    """Run the evaluation, save the result to `request.folder()` and return the checkpoint's step
    (collective).
    """
    recipe, folder = request.recipe(), request.folder()
    step = {} if request.checkpoint is None else {"step": request.checkpoint}
    trained = open_trained(request.run, world, allow_imports=request.allow_imports, **step)
    result = evaluate_split(
        trained.task,
        recipe,
        world,
        label_vectors=trained.data.label_vectors,
        inverse_propensities=trained.data.inverse_propensities(recipe.evaluation),
        manifest=trained.data.manifest,
        progress=progress,
    )
    if world.is_main:
        save_evaluation(folder, result, step=trained.step)
    world.barrier()
    return trained.step
