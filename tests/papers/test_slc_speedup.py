"""Paper 002, Table 3, at toy size."""

from collections.abc import Callable

from experiments.papers.experiment import Experiment
from experiments.papers.experiments.slc_speedup import EXPERIMENT, num_classes_of, speedups_of
from experiments.papers.section import Section


def test_one_logit_is_timed_against_all_logits(
    conducted: Callable[[Experiment], Section],
) -> None:
    section = conducted(EXPERIMENT)
    (table,) = section.tables
    assert [row[0] for row in table.rows] == ["1", "2^4", "2^6"]
    assert all(float(row[1].replace(",", "")) > 0 for row in table.rows)


def test_a_speedup_includes_the_backbone() -> None:
    seconds = {"backbone": [3.0] * 6, "one": [1.0] * 6, "10": [5.0] * 6}
    found = speedups_of({"seconds": seconds}, [10])
    assert found[10].text() == "2.00 (2.00 to 2.00)"


def test_half_powers_of_two_are_rounded_as_in_the_paper() -> None:
    assert num_classes_of(18.5) == 370_727
