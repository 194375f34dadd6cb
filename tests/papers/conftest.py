"""Fixtures for the tests of the paper experiments: tiny datasets and toy-size runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.papers.experiment import Experiment
from experiments.papers.job_runner import JobRunner
from experiments.papers.run_experiments import run_experiments
from experiments.papers.section import Section
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
        with JobRunner(papers_data, tmp_path, workers=0) as runner:
            (section,) = run_experiments([experiment], runner, minutes=0)
        for plot in section.plots:
            assert (tmp_path / "plots" / plot.file).stat().st_size > 1000
        return section

    return run
