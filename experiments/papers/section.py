"""The section of an experiment on the page, stored as JSON until the page is written."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from data.messages import pluralize
from experiments.papers.intervals import Mean

# Version of a section's JSON. Sections of another version are regenerated from the stored results.
_FORMAT = 4

PUBLISHED = "published"
Verdict = Literal["holds", "does not hold", "not settled"]


@dataclass(frozen=True)
class Claim:
    """A statement, its verdict, and the numbers behind the verdict."""

    statement: str
    verdict: Verdict
    evidence: str


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


@dataclass(frozen=True, kw_only=True)
class Section:
    """One experiment on the page.

    `name`, `paper` and `title` are those of the experiment; `run_experiments` sets them.
    `setup` describes what was run (networks, data, steps, seeds), `scale` is PUBLISHED for the
    paper's model and data and states otherwise what was run instead, `remarks` add caveats, and
    `minutes` is how long the jobs took with all workers in use.
    """

    name: str = ""
    paper: str = ""
    title: str = ""
    setup: str
    scale: str = PUBLISHED
    claims: Sequence[Claim] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    remarks: Sequence[str] = field(default_factory=tuple)
    minutes: float = 0.0

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
                "claims": [Claim(**claim) for claim in tree["claims"]],
                "tables": [Table(**table) for table in tree["tables"]],
                "plots": [Plot(**plot) for plot in tree["plots"]],
            }
        )


def paired(statement: str, gain: Mean, *, points: bool = False, note: str = "") -> Claim:
    """Return the claim that `gain`, a mean of differences paired by seed, is positive.

    `points`: show the gain, which is a fraction, in percentage points. `note`: text to append to
    the evidence.
    """
    shown = f"{gain.percent(2)} points" if points else gain.text(4)
    return Claim(statement, verdict(gain), f"{shown} (paired, {pluralize(gain.n, 'seed')}){note}")


def verdict_within(found: Mean, tolerance: float) -> Verdict:
    """Return the verdict on the claim that `found` differs from zero by less than `tolerance`."""
    if max(abs(found.low), abs(found.high)) < tolerance:
        return "holds"
    return "does not hold" if found.low > tolerance or found.high < -tolerance else "not settled"


def verdict(advantage: Mean) -> Verdict:
    """Return the verdict on the claim that `advantage` is positive.

    The claim holds if the whole interval is positive, and fails if no part of it is.
    """
    if advantage.low > 0:
        return "holds"
    return "does not hold" if advantage.high <= 0 else "not settled"
