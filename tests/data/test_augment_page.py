"""The recipes of docs/data.md."""

import re
from pathlib import Path

import yaml

from data.config import DataConfig

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")


def test_the_recipes_on_the_page_load() -> None:
    examples = re.findall(r"^```yaml\n(data:\n.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    recipes = [yaml.safe_load(example)["data"] for example in examples]
    assert len(recipes) >= 2
    for settings in recipes:
        DataConfig.model_validate({"shards": "shards", **settings})
