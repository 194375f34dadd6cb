"""The RECIPE argument of the commands: a YAML file, or the name of a recipe in `launch/recipes`."""

import difflib
import os
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import typer

RECIPES = Path(__file__).parent / "recipes"


def shipped_recipes() -> dict[str, str]:
    """Map the name of each shipped recipe to the first sentence of its header comment."""
    sentences = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        paragraph = takewhile(lambda line: line.strip("# "), lines)
        header = " ".join(line.lstrip("# ") for line in paragraph)
        sentences[path.stem] = header.partition(". ")[0].rstrip(".")
    return sentences


def find_recipe(text: str) -> Path:
    """Return the path of an existing file, or else of the shipped recipe with this name.

    Raises FileNotFoundError, which lists the shipped recipes, if neither exists. A path that
    contains a folder is returned unchanged.
    """
    path = Path(text)
    with suppress(OSError):  # the current folder is not accessible, or the name is too long
        if path.name != text or path.is_file():
            return path
    names = [recipe.stem for recipe in sorted(RECIPES.glob("*.yaml"))]
    name = text.removesuffix(".yaml")
    if name in names:
        return RECIPES / f"{name}.yaml"
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    problem = "is a folder" if os.path.isdir(path) else "does not exist"
    raise FileNotFoundError(
        f"recipe {text} {problem}: {hint}pass the path of a YAML file, or the name of a shipped "
        f"recipe: {', '.join(names)}"
    )


# These annotate the parameters of a command, which receives the path and the overrides.
RECIPE: Any = typer.Argument(
    metavar="RECIPE",
    parser=find_recipe,
    help="YAML file, or the name of a shipped recipe; kway train without arguments lists them",
)
OVERRIDES: Any = typer.Argument(
    metavar="KEY=VALUE", help="recipe overrides, such as optimizer.lr=0.4"
)
