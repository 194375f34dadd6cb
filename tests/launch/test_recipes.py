"""The shipped recipes: their comments are accurate, and the small recipes train."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.shipped import find_recipe
from tests.ranks import rank_world
from trainer.bundle.bundle import Bundle
from trainer.bundle.export import export_run
from trainer.config import Recipe
from trainer.evaluation import load_evaluation
from trainer.recipe import dump_recipe, load_recipe
from trainer.train import train

RECIPES = Path("launch/recipes")
SHIPPED = sorted(RECIPES.glob("*.yaml"))
NAMES: dict[str, Any] = {"ids": lambda path: path.stem}


def head_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line[1:] for line in lines if line.startswith("#"))


def commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each indented `kway` command line in a text."""
    for line in re.findall(r"^\s{3,}(kway .*)$", text, re.MULTILINE):
        yield shlex.split(line, comments=True)[1:]


# ---------------------------------------------------------------- the header comments


@pytest.mark.parametrize("path", [*SHIPPED, Path("docs/recipes.md")], **NAMES)
def test_every_documented_command_is_valid(
    path: Path, kway: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    text = head_comment(path) if path.suffix == ".yaml" else path.read_text(encoding="utf-8")
    given = list(commands(text))
    assert given
    for arguments in given:
        # Parse the command without running it.
        harmless = "--print-config" if arguments[0] == "train" else "--help"
        assert kway(*arguments, harmless) == 0, (arguments, capsys.readouterr().err)
        shown = capsys.readouterr().out
        if arguments[0] == "train":
            overrides = [part for part in arguments[2:] if re.match(r"[a-z_.]+=", part)]
            recipe = load_recipe(find_recipe(arguments[1]), overrides)
            assert shown == dump_recipe(recipe)


def test_no_two_recipes_share_a_run_folder() -> None:
    runs = [load_recipe(path).run for path in SHIPPED]
    assert len(set(runs)) == len(runs)


# ---------------------------------------------------------------- variants


def write(folder: Path, **files: str) -> list[Path]:
    paths = [folder / f"{name}.yaml" for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


COMPLETE = """
run: runs/one
data: {shards: s}
backbone: {config: {model_type: resnet}}
optimizer: {kind: adamw, lr: 0.5, eps: 0.1}
head: {loss: {kind: smooth_topk, k: 3}}
"""


def test_a_base_may_have_a_base_and_overrides_come_last(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    write(tmp_path / "inner", one=COMPLETE)
    _, three = write(
        tmp_path,
        two="base: inner/one.yaml\noptimizer: {lr: 0.25}\nhead: {loss: {kind: batch_ce}}",
        three="base: two.yaml\nrun: runs/three\nseed: 3",
    )
    recipe = load_recipe(three, ["seed=4", "optimizer.eps=0.2"])
    assert (str(recipe.run), recipe.seed, recipe.head.loss.kind) == ("runs/three", 4, "batch_ce")
    assert recipe.optimizer.model_dump(include={"kind", "lr", "eps"}) == {
        "kind": "adamw",
        "lr": 0.25,
        "eps": 0.2,
    }


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "base: none.yaml",
            FileNotFoundError,
            r"none\.yaml \(base of .*two\.yaml\) does not exist",
        ),
        ("base: two.yaml", ValueError, r"base is two\.yaml"),
        ("base: three.yaml", ValueError, r"three\.yaml: base is two\.yaml"),
        ("base: [one.yaml]", ValueError, "base"),
    ],
)
def test_an_invalid_base_raises_a_one_line_error(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    _, two, _ = write(tmp_path, one=COMPLETE, two=text, three="base: two.yaml")
    with pytest.raises(error, match=message) as raised:
        load_recipe(two)
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------- training


def trained(recipe: Recipe) -> dict[str, float]:
    """Train a recipe and return the metrics of its last evaluation."""
    train(recipe, rank_world())
    step = max(int(path.stem[5:]) for path in (recipe.run / "evaluations").glob("*.json"))
    return load_evaluation(recipe.run / "evaluations", step=step).metrics


def test_the_small_imagenet_recipe_learns(images: Path, tmp_path: Path) -> None:
    overrides = [
        f"run={tmp_path / 'run'}",
        f"data.shards={images}",
        "data.augment={crop_area: [0.8, 1.0], flip: 0}",  # the position of a bar is its class
        "train.global_batch=10",
    ]
    recipe = load_recipe(RECIPES / "imagenet-resnet50-small.yaml", overrides)
    assert trained(recipe)["top1"] >= 0.6
    export_run(recipe.run, tmp_path / "bundle", rank_world())
    assert Bundle.open(tmp_path / "bundle").spec.image == recipe.data.image
