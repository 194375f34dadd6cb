"""Write docs/papers.md, the summary of all papers, and docs/papers/NAME.md with their details.

The rows of the summary are defined in summary.yaml. Their numbers and statuses come from the claims
of the stored sections, so no result is typed by hand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from shutil import copyfile
from typing import Any

import yaml

from data.files import commit
from experiments.papers.section import PUBLISHED, Claim, Section, Table

# The names of the pages and plots below docs/papers.
_FOLDER = "papers"


class Status(StrEnum):
    """What a row of the summary shows."""

    REPRODUCED = "reproduced"
    DIRECTION = "direction only"
    CONTRADICTED = "contradicted"
    NOT_SETTLED = "not settled"
    NOT_RUN = "not run"


_STATUSES = (
    "A row is **reproduced** if the claim is shown at the scale that was *published* (the paper's "
    "model, data and steps), **contradicted** if its opposite is shown there, and **direction "
    "only** if a smaller model or fewer steps show the claim. A claim is shown if the whole "
    "interval is on its side; sizes may differ from the paper's. Any other result is **not "
    "settled**. If a row was **not run**, the column *scale* gives the reason."
)

_DATA = """DATA is a folder with these published files:

| path | source |
| --- | --- |
| `mnist/` | the four idx files from <http://yann.lecun.com/exdb/mnist/>, optionally gzipped |
| `cifar-100-binary.tar.gz` | <https://www.cs.toronto.edu/~kriz/cifar.html> |"""


@dataclass(frozen=True)
class Row:
    """A row of the summary: what a paper claims, what it printed, and what was measured."""

    item: str
    claim: str
    published: str
    ours: str
    scale: str
    status: Status
    command: str


@cache
def summary() -> Mapping[str, Any]:
    """Return the definitions of summary.yaml, by paper."""
    text = Path(__file__).with_name("summary.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def row(definition: Mapping[str, Any], sections: Mapping[str, Section]) -> Row:
    """Return a row of the summary.

    Raises KeyError if the section of its experiment does not contain one of its claims.
    """
    name = definition.get("experiment", "")
    command = definition.get("command", _command(name))
    shown = definition["item"], definition["claim"], definition["published"]
    claims = {claim.statement: claim for claim in sections[name].claims} if name in sections else {}
    missing = [one for one in definition.get("claims", ()) if one not in claims]
    if name not in sections or (missing and "if_short" in definition):
        reason = definition.get("if_short" if claims else "not_run", "not stored")
        has_command = bool(name) or "command" in definition
        return Row(*shown, "", reason, Status.NOT_RUN, command if has_command else "")
    if missing:
        raise KeyError(f"{name} has no claim {missing[0]!r}: correct summary.yaml")
    decisive = [claims[statement] for statement in definition["claims"]]
    scale = definition.get("scale", sections[name].scale)
    return Row(*shown, decisive[0].evidence, scale, status(decisive, scale), command)


def _command(name: str) -> str:
    """Return the command that runs an experiment. Those with `not_run` need a GPU."""
    rows = [row for definition in summary().values() for row in definition["rows"]]
    gpu = any(row.get("experiment") == name and "not_run" in row for row in rows)
    return f"python -m experiments.papers {name}{' --gpu' if gpu else ''} --data DATA"


def status(claims: Sequence[Claim], scale: str) -> Status:
    """Return the status of a row that all `claims` decide together."""
    verdicts = {claim.verdict for claim in claims}
    if any("at an edge of the search" in claim.evidence for claim in claims):
        return Status.NOT_SETTLED
    if verdicts == {"holds"}:
        return Status.REPRODUCED if scale == PUBLISHED else Status.DIRECTION
    if "does not hold" in verdicts and scale == PUBLISHED:
        return Status.CONTRADICTED
    return Status.NOT_SETTLED


def write_pages(sections: Sequence[Section], page: Path, *, plots: Path) -> None:
    """Write the summary to `page`, and details and plots to the folder papers/ next to it.

    `plots`: the folder with new plots; plots that it does not contain are left as they are.
    """
    folder = page.parent / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for section in sections:
        for plot in section.plots:
            if (plots / plot.file).is_file():
                copyfile(plots / plot.file, folder / plot.file)
    commit(page, summary_text(sections).encode())
    for paper in summary():
        of_paper = [section for section in sections if section.paper == paper]
        if of_paper:
            commit(folder / f"{paper}.md", details_text(paper, of_paper).encode())


def summary_text(sections: Sequence[Section]) -> str:
    """Return the summary as Markdown."""
    by_name = {section.name: section for section in sections}
    parts = [
        "# The papers' experiments",
        "<!-- Written by python -m experiments.papers from experiments/papers/results and "
        "summary.yaml. -->",
        "Which claims of the five papers that kway implements did its experiments reproduce? The "
        "column *paper* has values in the order of the claim. In the column *ours*, a number with "
        "± is the difference between the two losses that a claim compares, in accuracy or the "
        "named measure, unless the row names another quantity; a positive one agrees with the "
        "claim. Intervals are 95% (Student's t over seeds, draws or repeats; order statistics for "
        "ratios of times).",
    ]
    rows = {
        paper: [row(one, by_name) for one in definition["rows"]]
        for paper, definition in summary().items()
    }
    parts.append(_overview(rows))
    parts.append(_STATUSES)
    for paper, definition in summary().items():
        parts += [
            f"## {paper}: {definition['title']}",
            f"{definition['advice'].strip()} [Details]({_FOLDER}/{paper}.md).",
            _grid(
                ("item", "claim", "paper", "ours", "scale", "status"),
                [
                    (
                        one.item,
                        one.claim,
                        one.published,
                        one.ours,
                        one.scale,
                        f"**{one.status}**",
                    )
                    for one in rows[paper]
                ],
            ),
        ]
    parts += ["## Commands", "Rows without a command are omitted.", _commands(rows), _DATA]
    return "\n\n".join(parts) + "\n"


def _overview(rows: Mapping[str, Sequence[Row]]) -> str:
    """Return a table with the items of each status, and the number of those that were not run."""
    lines = [
        [
            f"[{paper}: {summary()[paper]['title']}](#{_anchor(paper)})",
            *(_items(of_paper, status) for status in Status if status is not Status.NOT_RUN),
            str(sum(one.status is Status.NOT_RUN for one in of_paper)),
        ]
        for paper, of_paper in rows.items()
    ]
    return _grid(["paper", *Status], lines)


def _items(rows: Sequence[Row], status: Status) -> str:
    return "; ".join(dict.fromkeys(one.item for one in rows if one.status is status))


def _anchor(paper: str) -> str:
    return f"{paper}-{summary()[paper]['title'].lower().replace(' ', '-')}"


def _commands(rows: Mapping[str, Sequence[Row]]) -> str:
    commands: dict[str, list[str]] = {}
    for paper, of_paper in rows.items():
        for one in of_paper:
            if one.command:
                commands.setdefault(one.command, []).append(f"{paper} {one.item}")
    return _grid(
        ["command", "rows"],
        [[f"`{command}`", "; ".join(dict.fromkeys(items))] for command, items in commands.items()],
    )


def details_text(paper: str, sections: Sequence[Section]) -> str:
    """Return the page with the claims, tables and plots of one paper."""
    parts = [
        f"# {paper}: {summary()[paper]['title']}",
        "<!-- Written by python -m experiments.papers. -->",
        "Back to the [summary](../papers.md).",
        *(_section(section) for section in sections),
    ]
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> str:
    spent = f", {section.minutes:.1f} minutes" if section.minutes else ""
    parts = [
        f"## {section.title}",
        f"`{_command(section.name)}`{spent}. {section.setup}",
        *(f"![{plot.alt_text}]({plot.file})\n\n*{_cell(plot.title)}*" for plot in section.plots),
        _grid(
            ("claim", "verdict", "evidence"),
            [(claim.statement, claim.verdict, claim.evidence) for claim in section.claims],
        ),
        *(_table(table) for table in section.tables),
        *(f"- {_cell(remark)}" for remark in section.remarks),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(table: Table) -> str:
    return f"**{_cell(table.title)}**\n\n{_grid(table.header, table.rows)}"


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(header), ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    escaped = text.replace("|", "\\|").replace("\n", " ")
    return escaped if escaped.startswith("**") else escaped.replace("*", "\\*")
