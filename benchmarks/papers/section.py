"""What an experiment has to show: a section of the page, as JSON between measuring and writing."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

from benchmarks.papers.intervals import Mean

# The layout of a section's JSON. Sections in another one are written again from the kept results.
_FORMAT = 2

# "degenerate": both sides of the comparison are the same model, so it decides nothing.
Verdict = Literal["holds", "does not hold", "not settled", "degenerate"]


class Kind(StrEnum):
    """What a claim is about. Only `PAPER` counts towards the page's headline."""

    PAPER = "paper"  # a statement of the paper, tested on its kind of model and data
    STAND_IN = "stand-in"  # a statement of the paper, tested on a much smaller model or input
    OWN_QUESTION = "own question"  # no paper states it
    TRIVIAL = "trivial"  # true by construction, whatever is measured
    OWN_CODE = "own code"  # about the speed or the stability of kway's implementation


@dataclass(frozen=True)
class Claim:
    """A statement, its verdict here, the numbers behind the verdict, and what it is about."""

    statement: str
    verdict: Verdict
    evidence: str
    kind: Kind


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
    """One experiment on the page.

    `setup` states what was run (networks, data, steps, seeds), `remarks` add caveats, and `minutes`
    is how long its jobs took on all workers. `results` are the keys of the results behind it, and
    `outdated` lists how many of them were measured with other code, another torch or another
    machine than the current ones.
    """

    name: str
    paper: str
    title: str
    setup: str
    claims: Sequence[Claim] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    remarks: Sequence[str] = field(default_factory=tuple)
    minutes: float = 0.0
    results: Sequence[str] = ()
    outdated: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        return {"format": _FORMAT, **asdict(self)}

    @staticmethod
    def from_json(tree: dict[str, Any]) -> "Section | None":
        """None for a section in the format of an earlier version."""
        if tree.pop("format", None) != _FORMAT:
            return None
        return Section(
            **{
                **tree,
                "claims": [
                    Claim(**{**claim, "kind": Kind(claim["kind"])}) for claim in tree["claims"]
                ],
                "tables": [Table(**table) for table in tree["tables"]],
                "pictures": [Picture(**picture) for picture in tree["pictures"]],
            }
        )


def paired(
    statement: str, gain: Mean, kind: Kind, *, points: bool = False, note: str = ""
) -> Claim:
    """The claim that `gain`, a mean of differences paired by seed, is positive.

    `points`: the gain is a share, shown in percent. `note` is appended to the evidence.
    """
    shown = f"{gain.percent(2)} points" if points else gain.text(4)
    return Claim(statement, verdict(gain), f"{shown} (paired, {gain.n} seeds){note}", kind)


def verdict(advantage: Mean | None) -> Verdict:
    """The verdict on the claim that `advantage` is positive: settled if its whole interval is
    positive, or none of it is. None: there was nothing to compare."""
    if advantage is None:
        return "degenerate"
    if advantage.low > 0:
        return "holds"
    return "does not hold" if advantage.high <= 0 else "not settled"


def agreed(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict for several readings of a claim, such as best and shared rates: the common one if
    all agree, otherwise "not settled", because the choice of reading would decide."""
    return verdicts[0] if len(set(verdicts)) == 1 else "not settled"
