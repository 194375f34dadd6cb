"""The section of an experiment on the page, stored as JSON until the page is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from data.messages import pluralize
from experiments.papers.intervals import Mean

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

    format: Literal[4] = 4  # of the JSON file
    name: str = ""
    paper: str = ""
    title: str = ""
    setup: str
    scale: str = PUBLISHED
    claims: Sequence[Claim] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    remarks: Sequence[str] = ()
    minutes: float = 0.0


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
