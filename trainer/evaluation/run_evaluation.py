"""Evaluates a run's checkpoint: which one, on which split, with which settings; and saves it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data.shards.split import Split, open_split
from trainer.config import Recipe
from trainer.evaluation.measure import evaluate_split
from trainer.evaluation.saved import save_evaluation
from trainer.run.folder import RunFolder, settings_of
from trainer.run.trained_run import open_trained
from trainer.world import World

_SETTINGS = ("data.image.crops", "data.image.resize", "data.workers")
# With another value of these what is measured is the same.
_IRRELEVANT = ("evaluation.batch", "data.workers", "data.eval_split")


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate: the newest checkpoint or that of a step, on the recipe's evaluation split
    or another, with `settings` (key=value) over the recipe's. Only components of `allow_imports`
    are imported."""

    run: Path
    checkpoint: int | None = None
    split: str | None = None
    settings: tuple[str, ...] = ()
    allow_imports: tuple[str, ...] = ()

    def recipe(self) -> Recipe:
        """The run's recipe with the settings; ValueError for one that is not evaluation's."""
        for setting in self.settings:
            key = setting.partition("=")[0]
            if not key.startswith("evaluation.") and key not in _SETTINGS:
                raise ValueError(
                    f"--set {setting} does not concern an evaluation: give evaluation.… or "
                    f"{', '.join(_SETTINGS)}"
                )
        split = [] if self.split is None else [f"data.eval_split={self.split}"]
        return RunFolder(self.run).load_recipe(
            [*split, *self.settings], allow_imports=self.allow_imports
        )

    def folder(self) -> Path:
        """Where the measures go. Those of another split or by other settings do not replace the
        recipe's own, whose thresholds are exported."""
        run_folder, recipe = RunFolder(self.run), self.recipe()
        own = run_folder.load_recipe(allow_imports=self.allow_imports)
        others = _changed_settings(own, recipe)
        if recipe.data.eval_split == own.data.eval_split and not others:
            return run_folder.evaluations
        return run_folder.evaluations / ",".join([recipe.data.eval_split, *others])


def _changed_settings(own: Recipe, wanted: Recipe) -> list[str]:
    """`key=value` of each setting that measures something else than the recipe's own."""
    before = settings_of(own)
    return [
        f"{key}={json.dumps(value, separators=(',', ':'))}"
        for key, value in sorted(settings_of(wanted).items())
        if key not in _IRRELEVANT and (key not in before or before[key] != value)
    ]


def open_evaluation_split(recipe: Recipe) -> Split:
    """The split that a recipe evaluates."""
    data = recipe.data
    return open_split(data.shards, data.eval_split, cache=data.cache)


def evaluate_run(
    wanted: EvaluationRequest,
    world: World,
    *,
    progress: Callable[[int], None] = lambda samples: None,
) -> int:
    """Evaluate and save to `wanted.folder()`; the checkpoint's step (collective)."""
    recipe = wanted.recipe()
    step = {} if wanted.checkpoint is None else {"step": wanted.checkpoint}
    trained = open_trained(wanted.run, world, allow_imports=wanted.allow_imports, **step)
    result = evaluate_split(
        trained.task,
        recipe,
        world,
        label_vectors=trained.label_vectors,
        manifest=trained.manifest,
        progress=progress,
    )
    if world.is_main:
        save_evaluation(wanted.folder(), result, step=trained.step)
    world.barrier()
    return trained.step
