"""Running experiments: jobs run once and within a budget, and their results become a page."""

from pathlib import Path

import pytest

from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.intervals import difference, mean
from experiments.papers.job import Results
from experiments.papers.job_runner import JobRunner
from experiments.papers.run_experiments import run_experiments, stored_sections
from experiments.papers.section import Section, Table, verdict
from tests.papers.counted import Doubling, doubling


def procedure(budget: Budget, _album: PlotFolder) -> Procedure:
    found: Results = {}
    for number in budget.rounds(at_least=1, at_most=4):
        found |= yield [doubling(number)]
    numbers = [result["double"] for result in found.values()]
    table = Table("Doubles", ["number"], [[str(number)] for number in numbers])
    return Section(setup=f"{len(numbers)} rounds", tables=[table])


ONE = Experiment("one", "001", "One", 1, procedure)


def test_results_obtained_before_an_error_are_stored(tmp_path: Path) -> None:
    with JobRunner(tmp_path, tmp_path / "out", workers=0) as runner:
        with pytest.raises(KeyError):
            runner.measure([doubling(1), Doubling("double", {})])
        assert runner.measure([doubling(1)])[doubling(1)]["double"] == 2
    assert (tmp_path / "done").read_text().split() == ["1"]


@pytest.mark.parametrize(
    "change", [('"format": 4', '"format": 3'), ('"setup"', '"step"'), ("}", "")]
)
def test_a_damaged_section_or_one_in_another_format_is_an_error(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    with JobRunner(tmp_path, tmp_path / "out", workers=0) as runner:
        run_experiments([ONE], runner, 60)
    path = tmp_path / "out" / "sections" / "one.json"
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ValueError, match=r"one\.json cannot be read .*: delete it") as caught:
        stored_sections(tmp_path / "out", [ONE])
    assert "\n" not in str(caught.value)


def test_an_experiment_runs_rounds_until_its_budget_is_spent(tmp_path: Path) -> None:
    for minutes, rounds in ((1e-9, 1), (60, 4)):
        out = tmp_path / str(minutes)
        with JobRunner(tmp_path, out, workers=0) as runner:
            (section,) = run_experiments([ONE], runner, minutes)
            assert section.setup == f"{rounds} rounds"
            assert section.minutes > 0
        (stored,) = stored_sections(out, [ONE])
        assert (stored.tables, stored.minutes) == (section.tables, section.minutes)


@pytest.mark.parametrize(
    ("spent", "minutes", "allowed"), [(19, 76, 76), (9, 76, 86), (55, 40, 40), (99, 7.6, 7.6)]
)
def test_the_longest_experiment_is_last_and_gets_what_the_others_leave(
    tmp_path: Path, spent: float, minutes: float, allowed: float
) -> None:
    budgets: list[Budget] = []

    def spending(budget: Budget, _plots: PlotFolder) -> Procedure:
        budget.spent = spent
        budgets.append(budget)
        yield []
        return Section(setup="")

    experiments = [Experiment("one", "001", "One", designed, spending) for designed in (80, 20)]
    with JobRunner(tmp_path, tmp_path / "out", workers=0) as runner:
        run_experiments(experiments, runner, 100)
    short, long = budgets
    assert (short.minutes, short.allowed, short.designed) == pytest.approx((19, 19, 20))
    assert (long.minutes, long.allowed, long.designed) == pytest.approx((minutes, allowed, 80))


def test_sizes_shrink_with_the_budget_and_do_not_grow() -> None:
    assert Budget(5, designed=10).size(100) == 50
    assert Budget(50, designed=10).size(100) == 100
    assert Budget(0, designed=10).size(100, least=7) == 7


def test_intervals_use_students_t() -> None:
    found = mean([1.0, 2.0, 3.0])
    assert (found.value, found.n) == (2.0, 3)
    assert found.half == pytest.approx(4.302653 * 1.0 / 3**0.5, rel=1e-6)
    assert mean([5.0]).text() == "5.000"
    assert difference([2.0, 4.0], [1.0, 3.0]).half == 0.0
    assert verdict(difference([0.1, 0.5], [0.1, 0.5])) == "does not hold"
    assert [verdict(mean(numbers)) for numbers in ([1, 2, 1.5], [-1, -2, -1.5], [-1, 1, 0])] == [
        "holds",
        "does not hold",
        "not settled",
    ]
