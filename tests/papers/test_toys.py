"""Experiments at toy size report the claims of the summary, and the published networks have valid
recipes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.networks import register_networks
from experiments.papers.experiment import Experiment
from experiments.papers.experiments import EXPERIMENTS
from experiments.papers.experiments.published_networks import TABLES, CifarTable
from experiments.papers.page import summary
from experiments.papers.section import Section
from trainer.recipe import build_recipe


def claimed(name: str) -> set[str]:
    """Return the statements of the summary's rows of an experiment."""
    rows = [one for of_paper in summary().values() for one in of_paper["rows"]]
    return {text for one in rows if one.get("experiment") == name for text in one["claims"]}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", ["000-synthetic", "000-norms", "000-cifar100", "001-lemmas", "002-mnist", "004-mnist"]
)
def test_an_experiment_reports_the_claims_of_the_summary(
    name: str, conducted: Callable[[Experiment], Section]
) -> None:
    (experiment,) = (one for one in EXPERIMENTS if one.name == name)
    section = conducted(experiment)
    statements = {claim.statement for claim in section.claims}
    assert claimed(name)
    assert claimed(name) <= statements


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_published_network_has_valid_recipes_for_the_claims_of_the_summary(
    table: CifarTable, tmp_path: Path
) -> None:
    more = {"ccql is closer to ce than to quadratic (test accuracy, all 100 classes)"}
    assert claimed(table.name) <= {one.statement for one in table.contrasts} | more
    register_networks()
    for arm in table.heads:
        tree = table.recipe(arm, 0.1, table.steps, 1, final=True)
        tree |= {"run": str(tmp_path), "data": {**tree["data"], "shards": str(tmp_path)}}
        recipe = build_recipe(tree, origin="a test")
        assert (recipe.data.image.size, recipe.data.augment.pad) == (32, 4)
        assert not table.dataset(arm, toy=False).limits
