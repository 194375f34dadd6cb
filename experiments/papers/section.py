"""The section of an experiment on the page, stored as JSON until the page is written."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

from experiments.papers.intervals import Mean

# Version of a section's JSON. Sections of another version are regenerated from the stored results.
_FORMAT = 3

# "degenerate": both sides of the comparison are the same model, so there is nothing to compare.
Verdict = Literal["holds", "does not hold", "not settled", "degenerate"]


class Kind(StrEnum):
    """The kind of a claim. Only `PAPER` counts toward the headline of the page."""

    PAPER = "paper"  # a claim from a paper, tested with its kind of model and data
    STAND_IN = "stand-in"  # a claim from a paper, tested with a much smaller model or input
    ADDITIONAL = "additional"  # not stated in a paper


@dataclass(frozen=True)
class Claim:
    """A statement, its verdict, the numbers behind the verdict, and the kind of the claim."""

    statement: str
    verdict: Verdict
    evidence: str
    kind: Kind


@dataclass(frozen=True)
class Table:
    """A table of text; every row has as many cells as `header`."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Plot:
    """A PNG file on the page, with its caption and its alternative text."""

    file: str
    title: str
    alt_text: str


@dataclass(frozen=True)
class Section:
    """One experiment on the page.

    `setup` describes what was run (networks, data, steps, seeds), `remarks` add caveats, and
    `minutes` is how long the jobs took with all workers in use. `results` contains the keys of the
    results used, and `outdated` lists how many of them were measured with older code, another torch
    version or another machine.
    """

    name: str
    paper: str
    title: str
    setup: str
    claims: Sequence[Claim] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    remarks: Sequence[str] = field(default_factory=tuple)
    minutes: float = 0.0
    results: Sequence[str] = ()
    outdated: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        return {"format": _FORMAT, **asdict(self)}

    @staticmethod
    def from_json(tree: dict[str, Any]) -> "Section | None":
        """Return the section, or None if it was written by an earlier version."""
        if tree.pop("format", None) != _FORMAT:
            return None
        return Section(
            **{
                **tree,
                "claims": [
                    Claim(**{**claim, "kind": Kind(claim["kind"])}) for claim in tree["claims"]
                ],
                "tables": [Table(**table) for table in tree["tables"]],
                "plots": [Plot(**plot) for plot in tree["plots"]],
            }
        )


def paired(
    statement: str, gain: Mean, kind: Kind, *, points: bool = False, note: str = ""
) -> Claim:
    """Return the claim that `gain`, a mean of differences paired by seed, is positive.

    `points`: show the gain, which is a fraction, in percentage points. `note`: text to append to
    the evidence.
    """
    shown = f"{gain.percent(2)} points" if points else gain.text(4)
    return Claim(statement, verdict(gain), f"{shown} (paired, {gain.n} seeds){note}", kind)


def verdict(advantage: Mean | None) -> Verdict:
    """Return the verdict on the claim that `advantage` is positive.

    The claim holds if the whole interval is positive, and fails if no part of it is. None means
    that both sides are the same model, so the claim is degenerate.
    """
    if advantage is None:
        return "degenerate"
    if advantage.low > 0:
        return "holds"
    return "does not hold" if advantage.high <= 0 else "not settled"


def agreed(verdicts: Sequence[Verdict]) -> Verdict:
    """Combine the verdicts of several evaluations of a claim, such as best and shared rates.

    If they differ, the claim is "not settled", because its verdict depends on the choice of
    evaluation.
    """
    return verdicts[0] if len(set(verdicts)) == 1 else "not settled"
