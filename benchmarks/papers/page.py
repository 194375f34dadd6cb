"""docs/papers.md from the sections that experiments left. No number on it is typed by hand."""

from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile
from typing import get_args

from benchmarks.papers.experiment import Experiment
from benchmarks.papers.section import Claim, Kind, Section, Table, Verdict
from data.files import commit

PAPERS = {
    "000": "Tree loss",
    "001": "Quadratic losses",
    "002": "Single-logit classification",
    "003": "Smooth top-k",
    "004": "Spherical losses",
    "beyond": "Beyond the papers",
}


_REST = (
    "Only the first row counts. *Stand-in*: a statement of a paper, tested on a model or input far "
    "smaller than the paper's (an MLP on images of 8 x 8 pixels, a BERT of one layer), which can "
    "neither confirm nor refute it. *Own question*: no paper states it. *Trivial*: true by "
    "construction. *Own code*: about the speed or stability of kway's implementation. "
    "*Degenerate*: both sides of the comparison are the same model, such as a tree loss whose tree "
    "has one inner node, which is cross entropy."
)

# What is of ImageNet, and stands in a recipe's first lines beside what to expect.
_IMAGENET = (
    "What the papers have of ImageNet no budget of this command trains; recipes do, on many GPUs: "
    "Table 1 of paper 000 is `kway train launch/recipes/imagenet-resnet50-vtree.yaml` beside "
    "`imagenet-resnet50.yaml`, Tables 1 and 2 of 002 are `imagenet-resnet50-batch-ce.yaml`, Table "
    "2 of 003 is `imagenet-resnet50-smooth-topk.yaml` on subsets. Each recipe says what it needs "
    "and what is published, docs/cluster.md how it runs."
)


_DATA = """DATA is a folder with what the experiments that are named need, as published:

| | |
|---|---|
| `mnist/` | the four idx files of <http://yann.lecun.com/exdb/mnist/>, packed by gzip or not |
| `cifar-100-binary.tar.gz` | <https://www.cs.toronto.edu/~kriz/cifar.html> |
| `tweeteval-emoji/` | `datasets/emoji` of <https://github.com/cardiffnlp/tweeteval> |
| `emoji2vec/emoji2vec.bin` | <https://github.com/uclnlp/emoji2vec> |"""


def write_page(
    sections: Sequence[Section],
    page: Path,
    *,
    catalogue: Sequence[Experiment],
    pictures: Path,
    command: str,
    machine: str,
) -> None:
    """Write `page` and copy its pictures from the folder `pictures` beside it, below `papers/`.

    `catalogue`: all experiments there are, whether or not they have a section.
    """
    folder = page.parent / "papers"
    for section in sections:
        for picture in section.pictures:
            folder.mkdir(parents=True, exist_ok=True)
            copyfile(pictures / picture.file, folder / picture.file)
    page.parent.mkdir(parents=True, exist_ok=True)
    commit(page, page_text(sections, catalogue, command=command, machine=machine).encode())


def page_text(
    sections: Sequence[Section], catalogue: Sequence[Experiment], *, command: str, machine: str
) -> str:
    """The page as Markdown."""
    parts = [
        "# The papers' experiments, run again",
        "<!-- Written by python -m benchmarks.papers: change the experiments, not this file. -->",
        f"`{command}` wrote this page from the results in its folder, which took "
        f"{sum(section.minutes for section in sections):.0f} minutes on all workers to measure "
        f"(page written on {machine}). `python -m benchmarks.papers NAME --data DATA` runs one "
        "experiment; each section starts with its name.",
        "Intervals are 95% confidence intervals of the mean over seeds (Student's t), paired by "
        "seed for differences; for times they are intervals of the median. At that level a few of "
        "many claims come out wrong by chance. Published numbers are in brackets.",
        "## What holds",
        _headline(sections),
        _counts(sections),
        _REST,
        _outdated(sections),
    ]
    by_paper = {
        title if paper == "beyond" else f"Paper {paper}: {title.lower()}": of_paper
        for paper, title in PAPERS.items()
        if (of_paper := [section for section in sections if section.paper == paper])
    }
    for name, of_paper in by_paper.items():
        parts += [f"**{name}**", _claims(of_paper)]
    for name, of_paper in by_paper.items():
        parts += [f"## {name}", *(_section(section) for section in of_paper)]
    parts += ["## What needs a GPU", _IMAGENET, _published_sizes(catalogue)]
    parts += ["## The data", _DATA]
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(sections: Sequence[Section]) -> str:
    of_papers = _of_kind(sections, Kind.PAPER)
    holds, fails, unsettled, degenerate = (
        sum(claim.verdict == one for claim in of_papers) for one in get_args(Verdict)
    )
    return (
        f"Of {len(of_papers) - degenerate} claims of the papers that were tested on the paper's "
        f"kind of model and data, {holds} hold, {fails} do not hold and {unsettled} are not "
        "settled with so few seeds. A claim with several readings, such as best and shared "
        "rates, is settled only where all of them agree."
    )


def _counts(sections: Sequence[Section]) -> str:
    rows = []
    for kind in Kind:
        verdicts = [claim.verdict for claim in _of_kind(sections, kind)]
        rows.append([kind, *(str(verdicts.count(one)) for one in get_args(Verdict))])
    return _grid(["about", *get_args(Verdict)], rows)


def _of_kind(sections: Sequence[Section], kind: Kind) -> list[Claim]:
    return [claim for section in sections for claim in section.claims if claim.kind is kind]


def _outdated(sections: Sequence[Section]) -> str:
    names = [section.name for section in sections if section.outdated]
    if not names:
        return ""
    return (
        "Measured with older code, another torch or, for timings, another machine than the page "
        f"was written with: {', '.join(names)}. Their sections give the numbers of such results; "
        "`python -m benchmarks.papers NAME --again` measures them again."
    )


def _published_sizes(catalogue: Sequence[Experiment]) -> str:
    header = ("experiment", "under --budget full", "takes")
    rows = [(one.name, one.full, "a GPU" if one.wants_gpu else "cores") for one in catalogue]
    return _grid(header, rows)


def _claims(sections: Sequence[Section]) -> str:
    header = ("experiment", "what is claimed", "about", "here", "numbers")
    rows = [
        (_marked(section), claim.statement, claim.kind, _said(claim.verdict), claim.evidence)
        for section in sections
        for claim in section.claims
    ]
    return _grid(header, rows)


def _marked(section: Section) -> str:
    return f"{section.name} (older code)" if section.outdated else section.name


def _said(verdict: Verdict) -> str:
    return f"<b>{verdict}</b>" if verdict == "does not hold" else verdict


def _section(section: Section) -> str:
    took = f"`{section.name}`, {section.minutes:.1f} minutes."
    parts = [f"### {section.title}", f"{took} {section.setup}"]
    parts += [f"**Older code:** {'; '.join(section.outdated)}." if section.outdated else ""]
    parts += [_table(table) for table in section.tables]
    parts += [
        f"![{picture.words}](papers/{picture.file})\n\n*{picture.title}*"
        for picture in section.pictures
    ]
    parts += [f"- {remark}" for remark in section.remarks]
    return "\n\n".join(part for part in parts if part)


def _table(table: Table) -> str:
    return f"**{_cell(table.title)}**\n\n{_grid(table.header, table.rows)}"


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("\n", " ")
