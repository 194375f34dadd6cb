"""The numbers that the papers print, from published.yaml, beside which ours stand."""

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
    """`published("002", "table 1", "MNIST")`: what stands there, numbers as printed.

    KeyError where nothing does.
    """
    found: Any = _all()
    for key in keys:
        found = found[key]
    return found
