"""Fixtures for tests of the papers' experiments: tiny datasets, and runs at toy size."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.papers.conduct import conduct
from benchmarks.papers.experiment import Experiment
from benchmarks.papers.laboratory import Laboratory
from benchmarks.papers.section import Section
from tests.papers.published_files import write_papers_data


@pytest.fixture(scope="session")
def papers_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for `--data`."""
    return write_papers_data(tmp_path_factory.mktemp("papers-data"))


@pytest.fixture
def conducted(
    papers_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Experiment], Section]:
    """Run an experiment at toy size in this process, with its figures in `tmp_path`."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the trainer would use every core

    def run(experiment: Experiment) -> Section:
        with Laboratory(papers_data, tmp_path, workers=0) as laboratory:
            (section,) = conduct([experiment], laboratory, minutes=0)
        for image in section.images:
            assert (tmp_path / "images" / image.file).stat().st_size > 1000
        return section

    return run
