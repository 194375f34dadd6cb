"""What an experiment has to show: a section of the page, as JSON between measuring and writing."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.papers.intervals import Mean

# What can be said of a published claim from here.
Verdict = Literal["holds", "does not hold", "not settled"]


@dataclass(frozen=True)
class Claim:
    """A published statement, whether ours agrees, and the numbers that say so."""

    statement: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Table:
    """Rows of text as long as `header`."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG beside the page; `words` are what somebody hears who does not see it."""

    file: str
    title: str
    words: str


@dataclass(frozen=True)
class Section:
    """`setup` says what was run (networks, data, steps, seeds), `remarks` what to bear in mind,
    `minutes` how long its jobs took on all workers."""

    name: str
    paper: str
    title: str
    setup: str
    claims: Sequence[Claim] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    remarks: Sequence[str] = field(default_factory=tuple)
    minutes: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(tree: dict[str, Any]) -> "Section":
        return Section(
            **{
                **tree,
                "claims": [Claim(**claim) for claim in tree["claims"]],
                "tables": [Table(**table) for table in tree["tables"]],
                "pictures": [Picture(**picture) for picture in tree["pictures"]],
            }
        )


def paired(statement: str, gain: Mean, *, points: bool = False) -> Claim:
    """That `gain`, of differences seed by seed, is positive; `points`: of shares, in percent."""
    shown = f"{gain.percent(2)} points" if points else gain.text(4)
    return Claim(statement, verdict(gain), f"{shown} (paired, {gain.n} seeds)")


def verdict(advantage: Mean) -> Verdict:
    """Of a claim that `advantage` is positive: settled where all of its interval is, or none."""
    if advantage.low > 0:
        return "holds"
    return "does not hold" if advantage.high <= 0 else "not settled"
