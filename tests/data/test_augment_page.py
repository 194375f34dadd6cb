"""The recipes of docs/data.md."""

import re
from pathlib import Path
from typing import Any

import yaml

from data.augment.training import AugmentConfig
from data.config import DataConfig
from data.images.config import ImageConfig

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "data.md").read_text(encoding="utf-8")


def data_of_recipes() -> list[dict[str, Any]]:
    examples = re.findall(r"^```yaml\n(data:\n.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [yaml.safe_load(example)["data"] for example in examples]


def test_the_recipes_on_the_page_load() -> None:
    recipes = data_of_recipes()
    assert len(recipes) >= 2
    for settings in recipes:
        DataConfig.model_validate({"shards": "shards", **settings})


def test_the_recipe_on_the_page_enables_every_augmentation() -> None:
    (settings,) = (each for each in data_of_recipes() if "augment" in each)
    assert ImageConfig.model_validate(settings["image"]).crops == 10
    # `crop_area` and `pad` are mutually exclusive; docs/extending.md has an example of `custom`.
    expected = AugmentConfig.model_fields.keys() - {"crop_ratio", "pad", "custom"}
    assert settings["augment"].keys() == expected
    augment = AugmentConfig.model_validate(settings["augment"])
    assert all(getattr(augment, name) for name in settings["augment"])
