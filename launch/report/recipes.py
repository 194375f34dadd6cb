"""The recipes of runs as flat keys, and where they differ."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

_MOST_BYTES, _MOST_KEYS = 1 << 20, 5_000
NOT_THERE = "–"


def read_recipe(path: Path) -> tuple[str, dict[str, str]]:
    """The text of a recipe, and its leaves as `optimizer.lr` -> `0.1`.

    Any YAML will do, that of an older kway too. Raises ValueError for what is none.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path.name} is larger than a recipe: {path.stat().st_size} bytes")
    text = path.read_text(encoding="utf-8")
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path.name} is not YAML: {error}") from error
    flat: dict[str, str] = {}
    for key, leaf in _leaves(tree, ""):
        if len(flat) == _MOST_KEYS:  # an alias that holds itself many times over
            raise ValueError(f"{path.name} has more than {_MOST_KEYS} keys")
        flat[key] = leaf
    return text, flat


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, _leaf(tree)


def _leaf(value: Any) -> str:
    return "null" if value is None else str(value)


def differences(recipes: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """Keys whose values differ between recipes, in the order of the first that has them; all runs
    have another folder, which says nothing."""
    keys = dict.fromkeys(key for recipe in recipes for key in recipe if key != "run")
    table = {key: [recipe.get(key, NOT_THERE) for recipe in recipes] for key in keys}
    return {key: values for key, values in table.items() if len(set(values)) > 1}
