"""Bundles that no test changes, shared by all files in this folder."""

from pathlib import Path

import pytest

from tests.serving.started import write_images
from tests.tiny_bundle import write


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bundles") / "pets")


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_images(tmp_path_factory.mktemp("images"))
