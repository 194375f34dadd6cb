"""Fixtures that several rooms share: small shards, made once a session; and one thread a test."""

from pathlib import Path

import pytest
import torch
from threadpoolctl import threadpool_limits

from tests.shards import glyph_shards, picture_shards, text_shards

# Tests run side by side, some with ranks of their own: more threads stand in each other's way.
torch.set_num_threads(1)
threadpool_limits(1)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 5 classes of pictures in colour, without label vectors."""
    return picture_shards(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def glyphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 13 characters, with label vectors."""
    return glyph_shards(tmp_path_factory.mktemp("glyphs"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `shards` of texts of 4 classes, and a `tokenizer` for them."""
    return text_shards(tmp_path_factory.mktemp("texts"))
