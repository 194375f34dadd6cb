"""Fixtures that several rooms share: small shards, made once a session."""

from pathlib import Path

import pytest

from tests.shards import glyph_shards, picture_shards


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 5 classes of pictures in colour, without label vectors."""
    return picture_shards(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def glyphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 13 characters, with label vectors."""
    return glyph_shards(tmp_path_factory.mktemp("glyphs"))
