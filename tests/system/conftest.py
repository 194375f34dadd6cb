"""Fixtures for the tests of complete runs."""

from pathlib import Path

import pytest

from tests.shards import glyph_recipe
from tests.system.processes import write_recipe


def logging_recipe(shards: Path, folder: Path, *, steps: int, save_every: int) -> Path:
    """Write a recipe with a loader process that logs each step."""
    recipe = glyph_recipe(
        shards,
        folder / "unused",
        train__duration={"steps": steps},
        checkpoint={"every": {"steps": save_every}},
        telemetry={"log_every": 1},
        data__workers=1,
    )
    return write_recipe(folder, recipe)


@pytest.fixture
def endless(glyphs: Path, tmp_path: Path) -> Path:
    """A recipe that trains until it is stopped, and saves a checkpoint only then."""
    return logging_recipe(glyphs, tmp_path, steps=100_000, save_every=90_000)
