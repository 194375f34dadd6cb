"""Fixtures for the tests of complete runs."""

from pathlib import Path

import pytest

from tests.shards import glyph_recipe
from tests.system.processes import write_recipe


@pytest.fixture
def endless(glyphs: Path, tmp_path: Path) -> Path:
    """A recipe that trains until it is stopped, and saves a checkpoint only then."""
    return write_recipe(
        tmp_path,
        glyph_recipe(
            glyphs,
            tmp_path / "unused",
            train__duration={"steps": 100_000},
            checkpoint={"every": {"steps": 90_000}},
            telemetry={"log_every": 1},
            data__workers=1,
        ),
    )
