"""The pages of the papers' experiments: rows, statuses and stored results."""

import pytest

from experiments.papers.experiments import EXPERIMENTS
from experiments.papers.page import Status, details_text, row, status, summary, summary_text
from experiments.papers.run_experiments import stored_sections
from experiments.papers.section import Claim, Section, Table, Verdict
from tests.system.processes import ROOT

RESULTS = ROOT / "experiments" / "papers" / "results"


def claim(verdict: Verdict, evidence: str = "") -> Claim:
    return Claim("it wins", verdict, evidence)


@pytest.mark.parametrize(
    ("verdicts", "scale", "expected"),
    [
        (["holds"], "published", Status.REPRODUCED),
        (["holds", "holds"], "an MLP", Status.DIRECTION),
        (["holds", "does not hold"], "published", Status.CONTRADICTED),
        (["holds", "does not hold"], "an MLP", Status.NOT_SETTLED),
        (["holds", "not settled"], "published", Status.NOT_SETTLED),
    ],
)
def test_only_the_published_scale_can_reproduce_or_contradict(
    verdicts: list[Verdict], scale: str, expected: Status
) -> None:
    assert status([claim(verdict) for verdict in verdicts], scale) is expected


def test_every_row_has_stored_results_or_the_reason_why_it_was_not_run() -> None:
    sections = {one.name: one for one in stored_sections(ROOT, EXPERIMENTS, kept=RESULTS)}
    for paper, definition in summary().items():
        for one in definition["rows"]:
            found = row(one, sections)
            assert (found.status is Status.NOT_RUN) == ("not_run" in one), (paper, found)


def test_the_committed_pages_are_made_from_the_stored_results() -> None:
    sections = stored_sections(ROOT, EXPERIMENTS, kept=RESULTS)
    docs = ROOT / "docs"
    assert (docs / "papers.md").read_text(encoding="utf-8") == summary_text(sections)
    for paper in summary():
        of_paper = [one for one in sections if one.paper == paper]
        text = (docs / "papers" / f"{paper}.md").read_text(encoding="utf-8")
        assert text == details_text(paper, of_paper)
        for plot in (plot for one in of_paper for plot in one.plots):
            assert (docs / "papers" / plot.file).is_file()


def test_the_details_contain_every_claim_and_table_with_escaped_cells() -> None:
    section = Section(
        name="one",
        paper="001",
        title="One",
        setup="As it was.",
        claims=[Claim("a|b", "holds", "1 > 0")],
        tables=[Table("T", ["x", "y"], [["1", "2|3"]])],
        remarks=["A remark."],
    )
    text = details_text("001", [section])
    assert "| a\\|b | holds | 1 > 0 |" in text
    assert "| 1 | 2\\|3 |" in text
    assert "- A remark." in text
