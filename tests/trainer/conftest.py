"""Runs that several test modules read. Tests that change them must copy them first."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def _made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the first of pytest-xdist's workers makes for all of them."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name / "made").exists():
            (folder / name).mkdir(exist_ok=True)
            make(folder / name)
            (folder / name / "made").touch()
    return folder / name


@pytest.fixture(scope="session")
def finished(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished `run` of four steps on `glyphs`, and its `bundle`."""
    from tests.ranks import rank_world
    from tests.shards import glyph_recipe
    from trainer.bundle.export import export_run
    from trainer.train import train

    def make(folder: Path) -> None:
        train(glyph_recipe(glyphs, folder / "run"), rank_world())
        export_run(folder / "run", folder / "bundle", rank_world())

    return _made_once(tmp_path_factory, "finished", make)
