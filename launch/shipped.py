"""The RECIPE argument of the commands: a YAML file, or the name of a recipe in `launch/recipes`."""

import difflib
import os
from pathlib import Path
from typing import Any

import typer

RECIPES = Path(__file__).parent / "recipes"


def shipped_recipes() -> dict[str, str]:
    """Map the name of each shipped recipe to the first sentence of its header comment."""
    return {path.stem: _first_sentence(path) for path in sorted(RECIPES.glob("*.yaml"))}


def find_recipe(text: str) -> Path:
    """Return the path of an existing file, or else of the shipped recipe with this name.

    Raises FileNotFoundError, which lists the shipped recipes, if neither exists. A path that
    contains a folder is returned unchanged.
    """
    path = Path(text)
    if path.name != text or _exists(path):
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


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the current folder is not accessible, or the name is too long for a file
        return False


# These annotate the parameters of a command, which receives the path and the overrides.
RECIPE: Any = typer.Argument(
    metavar="RECIPE",
    parser=find_recipe,
    help="YAML file, or the name of a shipped recipe; kway train without arguments lists them",
)
OVERRIDES: Any = typer.Argument(
    metavar="KEY=VALUE", help="recipe overrides, such as optimizer.lr=0.4"
)


def _first_sentence(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    paragraph = lines[: next(i for i, line in enumerate(lines) if line.strip("# ") == "")]
    return " ".join(line.lstrip("# ") for line in paragraph).partition(". ")[0].rstrip(".")
