"""Write docs/papers.md from the sections of the experiments. No number is typed by hand."""

from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile
from typing import get_args

from data.files import commit
from experiments.papers.experiment import Experiment
from experiments.papers.section import Claim, Kind, Section, Table, Verdict

PAPERS = {
    "000": "Tree loss",
    "001": "Quadratic losses",
    "002": "Single-logit classification",
    "003": "Smooth top-k",
    "004": "Spherical losses",
}


_REST = (
    "Only the first row tests the papers. A *stand-in* claim is a claim from a paper, tested with "
    "a much smaller model or input, such as an MLP on images of 8 x 8 pixels or a one-layer BERT. "
    "Such a test can neither confirm nor refute the claim. An *additional* claim answers a "
    "question that none of the papers asks. A verdict is *degenerate* if both sides of the "
    "comparison are the same model: for example, a tree loss is the same as cross entropy if its "
    "tree has a single inner node."
)

_IMAGENET = (
    "`python -m experiments.papers` does not run the papers' ImageNet experiments at any budget. "
    "To run them, use the recipes in `launch/recipes/` on many GPUs: Table 1 of paper 000 compares "
    "`imagenet-resnet50-vtree.yaml` with `imagenet-resnet50.yaml`, Tables 1 and 2 of paper 002 "
    "use `imagenet-resnet50-batch-ce.yaml`, and Table 2 of paper 003 uses "
    "`imagenet-resnet50-smooth-topk.yaml` on subsets. Each recipe lists its requirements and "
    "the published results; docs/cluster.md explains how to run it."
)


_DATA = """DATA is a folder with the published files that the experiments need:

| path | source |
| --- | --- |
| `mnist/` | the four idx files from <http://yann.lecun.com/exdb/mnist/>, optionally gzipped |
| `cifar-100-binary.tar.gz` | <https://www.cs.toronto.edu/~kriz/cifar.html> |
| `tweeteval-emoji/` | `datasets/emoji` from <https://github.com/cardiffnlp/tweeteval> |
| `emoji2vec/emoji2vec.bin` | <https://github.com/uclnlp/emoji2vec> |"""


def write_page(
    sections: Sequence[Section],
    page: Path,
    *,
    catalog: Sequence[Experiment],
    plots: Path,
    command: str,
    machine: str,
) -> None:
    """Write `page`, and copy its plots from the folder `plots` to `papers/` next to the page.

    `catalog`: all experiments, whether or not they have a section.
    """
    folder = page.parent / "papers"
    for section in sections:
        for plot in section.plots:
            folder.mkdir(parents=True, exist_ok=True)
            copyfile(plots / plot.file, folder / plot.file)
    page.parent.mkdir(parents=True, exist_ok=True)
    commit(page, page_text(sections, catalog, command=command, machine=machine).encode())


def page_text(
    sections: Sequence[Section], catalog: Sequence[Experiment], *, command: str, machine: str
) -> str:
    """Return the page as Markdown."""
    parts = [
        "# Reproducing the papers' experiments",
        "<!-- Written by python -m experiments.papers: change the experiments, not this file. -->",
        f"This page was written by `{command}`. The measurements took "
        f"{sum(section.minutes for section in sections):.0f} minutes with all workers in use "
        f"(page written on {machine}). To run a single experiment, use "
        "`python -m experiments.papers NAME --data DATA`; each section starts with the "
        "name of its experiment.",
        "All intervals are 95% confidence intervals: of the median for times, and otherwise of the "
        "mean over seeds (Student's t). Differences are paired by seed. At this confidence level, "
        "a few of the verdicts can be expected to be wrong by chance. Published numbers are in "
        "parentheses.",
        "## Summary",
        _headline(sections),
        _counts(sections),
        _REST,
        _outdated(sections),
    ]
    by_paper = {
        f"Paper {paper}: {title.lower()}": of_paper
        for paper, title in PAPERS.items()
        if (of_paper := [section for section in sections if section.paper == paper])
    }
    for name, of_paper in by_paper.items():
        parts += [f"**{name}**", _claims(of_paper)]
    for name, of_paper in by_paper.items():
        parts += [f"## {name}", *(_section(section) for section in of_paper)]
    parts += ["## Full-size runs", _IMAGENET, _published_sizes(catalog)]
    parts += ["## Data", _DATA]
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(sections: Sequence[Section]) -> str:
    of_papers = _of_kind(sections, Kind.PAPER)
    holds, fails, unsettled, degenerate = (
        sum(claim.verdict == one for claim in of_papers) for one in get_args(Verdict)
    )
    return (
        f"{len(of_papers) - degenerate} claims from the papers were tested with the same kind of "
        f"model and data as in the paper: {holds} hold, {fails} do not hold, and {unsettled} "
        "cannot be settled with this number of seeds. A claim that was evaluated in several ways, "
        "for example at each loss's best learning rate and at a shared one, counts as settled only "
        "if all evaluations agree."
    )


def _counts(sections: Sequence[Section]) -> str:
    rows = []
    for kind in Kind:
        verdicts = [claim.verdict for claim in _of_kind(sections, kind)]
        rows.append([kind, *(str(verdicts.count(one)) for one in get_args(Verdict))])
    return _grid(["kind of claim", *get_args(Verdict)], rows)


def _of_kind(sections: Sequence[Section], kind: Kind) -> list[Claim]:
    return [claim for section in sections for claim in section.claims if claim.kind is kind]


def _outdated(sections: Sequence[Section]) -> str:
    names = [section.name for section in sections if section.outdated]
    if not names:
        return ""
    return (
        "Some results of these experiments were measured with older code, a different torch "
        f"version or (for timings) on a different machine: {', '.join(names)}. Each of their "
        "sections gives the number of such results. To measure them again, run "
        "`python -m experiments.papers NAME --again`."
    )


def _published_sizes(catalog: Sequence[Experiment]) -> str:
    header = ("experiment", "with --budget full", "hardware")
    rows = [(one.name, one.full, "GPU" if one.wants_gpu else "CPU") for one in catalog]
    return _grid(header, rows)


def _claims(sections: Sequence[Section]) -> str:
    header = ("experiment", "claim", "kind", "verdict", "evidence")
    rows = [
        (
            _marked(section),
            claim.statement,
            claim.kind,
            _bold(claim.verdict),
            claim.evidence,
        )
        for section in sections
        for claim in section.claims
    ]
    return _grid(header, rows)


def _marked(section: Section) -> str:
    return f"{section.name} (older code)" if section.outdated else section.name


def _bold(verdict: Verdict) -> str:
    return f"<b>{verdict}</b>" if verdict == "does not hold" else verdict


def _section(section: Section) -> str:
    name_and_time = f"`{section.name}`, {section.minutes:.1f} minutes."
    parts = [f"### {section.title}", f"{name_and_time} {section.setup}"]
    parts += [f"**Older code:** {'; '.join(section.outdated)}." if section.outdated else ""]
    parts += [_table(table) for table in section.tables]
    parts += [f"![{plot.alt_text}](papers/{plot.file})\n\n*{plot.title}*" for plot in section.plots]
    parts += [f"- {remark}" for remark in section.remarks]
    return "\n\n".join(part for part in parts if part)


def _table(table: Table) -> str:
    return f"**{_cell(table.title)}**\n\n{_grid(table.header, table.rows)}"


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("\n", " ")
