"""With `--budget full`, the recipes of all runs are valid and use the published networks."""

from pathlib import Path

import pytest

from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment, PlotFolder
from experiments.papers.experiments import EXPERIMENTS
from experiments.papers.job import Job, Result
from experiments.papers.training import LEARNED
from trainer.config import Recipe
from trainer.recipe import build_recipe

_NETWORKS = {
    "000-cifar100": {"model_type": "cifar_resnet", "depth": 20},
    "001-cifar100": {"model_type": "wide_resnet", "depth": 28, "width": 10},
    "002-mnist": {"model_type": "mlp"},
    "002-cifar100": {"model_type": "slc_cnn"},
    "003-label-noise": {"model_type": "cifar_densenet", "depth": 40, "growth_rate": 40},
    "003-sizes": {"model_type": "cifar_densenet", "depth": 40, "growth_rate": 12},
    "003-temperature": {"model_type": "cifar_densenet", "depth": 40, "growth_rate": 12},
}


def searched(experiment: Experiment, plots: Path) -> list[Job]:
    """Return the first training jobs of an experiment. Earlier jobs get invented results."""
    procedure = experiment.procedure(Budget(None, experiment.minutes), PlotFolder(plots))
    jobs = next(procedure)
    while not jobs[0].function.startswith("training"):
        jobs = procedure.send({job: Result(_made_up(job), 0.0) for job in jobs})
    return list(jobs)


def _made_up(job: Job) -> dict[str, object]:
    if job.function.endswith("class_names"):
        mammals = ["large_carnivores"] * 25
        return {"names": [str(i) for i in range(100)], "coarse": [*mammals, *["other"] * 75]}
    return {"train": 45_000, "validation": 5_000, "test": 10_000}


@pytest.mark.parametrize("name", _NETWORKS)
def test_the_full_budget_uses_published_networks_and_all_images(name: str, tmp_path: Path) -> None:
    (experiment,) = (each for each in EXPERIMENTS if each.name == name)
    for job in searched(experiment, tmp_path):
        recipe = built(job, tmp_path)
        network = recipe.backbone.config
        assert network is not None
        assert {key: network[key] for key in _NETWORKS[name]} == _NETWORKS[name]
        if name != "003-sizes":
            assert not job.settings["dataset"]["limits"]
        if name != "002-mnist":
            assert (recipe.data.image.size, recipe.data.augment.pad) == (32, 4)


def test_a_pretrained_encoder_uses_its_own_tokenizer(tmp_path: Path) -> None:
    (experiment,) = (each for each in EXPERIMENTS if each.name == "000-twitter")
    for job in searched(experiment, tmp_path):
        recipe = built(job, tmp_path)
        assert recipe.data.text is not None
        assert recipe.data.text.tokenizer == f"hub:{recipe.backbone.name}" != LEARNED


def built(job: Job, folder: Path) -> Recipe:
    tree = dict(job.settings["recipe"])
    tree |= {"run": str(folder / "run"), "data": {**tree["data"], "shards": str(folder)}}
    return build_recipe(tree, origin="a test")
