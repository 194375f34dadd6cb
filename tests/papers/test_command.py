"""The command `python -m experiments.papers`: its list of experiments, one-line errors and page."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from experiments.papers import __main__
from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.job_runner import JobRunner
from experiments.papers.section import Claim, Section, Table
from launch.main import run
from tests.dispositions import default_signals
from tests.papers.counted import doubling

Papers = Callable[..., int]
_NEEDED = "numbers.txt"


def _section_of(name: str, plots: PlotFolder, double: int) -> Section:
    plot = plots.save(name, Figure(figsize=(1, 1)), title="Nothing.", alt_text="A blank.")
    return Section(
        setup="As it was.",
        claims=[Claim("it is doubled", "holds", f"{double}")],
        tables=[Table("Doubles", ["double"], [[f"{double}"]])],
        plots=[plot],
    )


def _procedure(name: str) -> Callable[[Budget, PlotFolder], Procedure]:
    def procedure(_budget: Budget, plots: PlotFolder) -> Procedure:
        job = doubling(4_321)
        results = yield [job]
        return _section_of(name, plots, results[job]["double"])

    return procedure


def _fails(_budget: Budget, _album: PlotFolder) -> Procedure:
    yield from ()
    raise ValueError("no numbers are left: add more")


# Both use the same job.
_ONE = Experiment("001-one", "001", "The first", 1, _procedure("001-one"))
_TWO = Experiment("002-two", "002", "The second", 2, _procedure("002-two"))
_BAD = Experiment("003-bad", "003", "The third", 3, _fails, needs=(_NEEDED,))
_GPU = Experiment("004-gpu", "004", "The fourth", 1, _fails, gpu=True)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder for `--data` in the working directory of the command."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / _NEEDED).touch()
    return folder


@pytest.fixture(autouse=True)
def _called_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> Papers:
    """Run the command and return its exit code. It runs in this process to save the import time."""

    def run_papers(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["papers", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            run(__main__.app)
        return int(caught.value.code or 0)

    return run_papers


@pytest.fixture
def _three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "EXPERIMENTS", (_ONE, _TWO, _BAD, _GPU))


@pytest.mark.usefixtures("_three")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["005"], "all, 001, 002, 003, 004, 001-one, 002-two, 003-bad, 004-gpu"),
        (["001-one", "001-on"], "001-on"),
        *((["001", "--minutes", wrong], f"--minutes is {wrong}: ")
          for wrong in ("0", "nan", "inf")),
        (["001-one", "--gpu"], "remove --gpu"),
        (["004-gpu"], "add --gpu"),
        (["003", "--data", "none"], _NEEDED),
        (["all", "--data", f"data/{_NEEDED}"], f"data/{_NEEDED}/{_NEEDED} does not exist"),
        (["001", "--page", "data"], "data is a folder: "),
        (["001", "--page-only"], "--page-only"),
        (["--page-only"], "runs/papers"),
    ],
)  # fmt: skip
def test_invalid_arguments_exit_with_2_and_write_nothing(
    arguments: list[str],
    message: str,
    papers: Papers,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert papers(*arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1, error
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [data / _NEEDED]


@pytest.mark.usefixtures("_three")
def test_a_folder_in_use_is_not_changed(
    papers: Papers, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with JobRunner(data, tmp_path / "out", workers=0):
        assert papers("001", "--out", "out") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{tmp_path / 'out'} is in use" in error
    assert not (tmp_path / "out" / "papers.md").exists()


@pytest.mark.usefixtures("_three")
def test_a_page_is_written_with_figures_and_results_are_reused(
    papers: Papers, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--data", data, "--out", "out", "--minutes", "2", "--workers", "1")
    page = tmp_path / "out" / "papers.md"

    assert papers("001", *given) == 0
    out, error = capsys.readouterr()
    assert out == "out/papers.md: 1 experiment\n"
    assert "001-one: 1 of 1 jobs" in error.splitlines()[-1]
    assert "min elapsed, budget used " in error.splitlines()[-1]
    first = page.read_text()
    assert "[Details](papers/001.md)" in first
    details = (page.parent / "papers" / "001.md").read_text()
    assert "| it is doubled | holds | 8642 |" in details
    assert "![A blank.](001-one.png)" in details
    written = {path.name for path in (page.parent / "papers").iterdir()}
    assert written == {"001-one.png", "001.md"}

    # Run it again. Then run another experiment with the same job, and write its page to another
    # folder.
    assert papers("001", *given) == 0
    elsewhere = tmp_path / "docs" / "of papers.md"
    assert papers("002-two", *given, "--page", elsewhere) == 0
    assert capsys.readouterr().out.endswith("of papers.md: 2 experiments\n")
    written = {path.name for path in (elsewhere.parent / "papers").iterdir()}
    assert written == {"001-one.png", "001.md", "002-two.png", "002.md"}

    # An error stops the command, but the page contains the experiments that finished before it.
    details_of_two = page.parent / "papers" / "002.md"
    assert papers("all", *given) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last == "error: no numbers are left: add more"
    assert "## The second" in details_of_two.read_text()

    # Write only the page, while another runner is running.
    details_of_two.unlink()
    with JobRunner(data, tmp_path / "out", workers=0):
        assert papers("--page-only", "--out", "out") == 0
    assert capsys.readouterr().out == "out/papers.md: 2 experiments\n"
    assert "## The second" in details_of_two.read_text()

    assert (data / "done").read_text() == "4321\n"  # the job ran once


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@default_signals()
def test_an_interrupted_run_keeps_its_results_and_resumes(
    number: int, code: int, papers: Papers, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def procedure(_budget: Budget, _plots: PlotFolder) -> Procedure:
        yield [doubling(1)]
        signal.raise_signal(number)
        raise AssertionError

    interrupted = Experiment("001-one", "001", "The first", 1, procedure)
    monkeypatch.setattr(__main__, "EXPERIMENTS", (interrupted,))
    for _ in range(2):
        assert papers("001", "--data", data, "--out", "out", "--workers", "1") == code
    assert (data / "done").read_text() == "1\n"  # the job ran once


def test_a_run_whose_time_is_up_ends_and_says_how_to_resume(
    papers: Papers, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(__main__, "EXPERIMENTS", (_ONE,))
    monkeypatch.setattr(__main__, "_MINUTES_OVER", -1e9)
    assert papers("001", "--data", data, "--out", "out", "--workers", "1") == 0
    error = capsys.readouterr().err
    assert "the time is up during 001-one: run the same command again to resume" in error
