"""The numbers printed in the papers, from published.yaml."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def _all() -> dict[str, Any]:
    text = Path(__file__).with_name("published.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = yaml.safe_load(text)
    return tree


def published(*keys: str) -> Any:
    """Return an entry, for example `published("002", "table 1", "MNIST")`, with numbers as printed.

    Raises KeyError if there is no such entry.
    """
    found: Any = _all()
    for key in keys:
        found = found[key]
    return found
