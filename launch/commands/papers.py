"""`kway papers`: the experiments of the five papers, run again within a budget."""

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.commands.place import check_writable
from launch.wording import counted, printable

if TYPE_CHECKING:
    from benchmarks.papers.budget import Budget
    from benchmarks.papers.experiment import Experiment

_SECONDS_BETWEEN_LINES = 10


def papers(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="all, a paper (000 to 004, beyond), or experiments"),
    ] = None,
    data: Annotated[
        Path,
        typer.Option(
            help="with mnist/, cifar-100-binary.tar.gz, tweeteval-emoji/, emoji2vec/, as published"
        ),
    ] = Path("data"),
    budget: Annotated[
        str,
        typer.Option(
            help="minutes for all that is named together, about; or full: published sizes"
        ),
    ] = "60",
    out: Annotated[
        Path,
        typer.Option("-o", "--out", help="results, shards and pictures; kept and gone on with"),
    ] = Path("runs/papers"),
    page: Annotated[Path | None, typer.Option(help="the page; default: papers.md in --out")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="runs at a time; default: GPUs, or cores without any")
    ] = None,
) -> None:
    """Run the experiments of the papers again and write the page that compares them.

    Without a name it lists them. What was measured before is not measured again: the same command
    goes on with what was cut off.
    """
    from benchmarks.papers.experiments import EXPERIMENTS

    if not names:
        for one in EXPERIMENTS:
            print(f"{one.name}  {one.title}, {one.minutes:g} min of an hour")
        return
    from benchmarks.machine import machine
    from benchmarks.papers.conduct import conduct, kept_sections
    from benchmarks.papers.laboratory import Laboratory
    from benchmarks.papers.page import write_page

    chosen = _chosen(EXPERIMENTS, names)
    minutes = _minutes(budget)
    _check_data(chosen, data)
    written = page or out / "papers.md"
    if out.is_file():
        raise NotADirectoryError(f"{out} is a file: name a folder with --out")
    if written.is_dir():
        raise IsADirectoryError(f"{written} is a folder: name a file in it with --page")
    for folder in (out, written.parent):
        folder.mkdir(parents=True, exist_ok=True)
    check_writable(out / "results.json", "--out")
    check_writable(written, "--page")
    where = machine()
    command = shlex.join(["kway", "papers", *names, "--data", "DATA", "--budget", budget])
    opened = Laboratory(data.resolve(), out.resolve(), workers=workers or _default_workers())
    with opened as laboratory:
        try:
            conduct(chosen, laboratory, minutes, _report())
        finally:
            # What was done before an error is worth a page, too.
            sections = kept_sections(laboratory, EXPERIMENTS)
            if sections:
                write_page(
                    sections,
                    written,
                    catalogue=EXPERIMENTS,
                    pictures=laboratory.out / "pictures",
                    command=command,
                    machine=where,
                )
    print(printable(f"{written}: {counted(len(sections), 'experiment')}"))


def _check_data(chosen: "list[Experiment]", data: Path) -> None:
    """Before anything is measured, for that takes long."""
    for one in chosen:
        for needed in one.needs:
            if not (data / needed).exists():
                raise FileNotFoundError(
                    f"{one.name} needs {needed} as published in --data, and {data / needed} does "
                    "not exist: name the folder that has it"
                )


def _chosen(catalogue: "tuple[Experiment, ...]", names: list[str]) -> "list[Experiment]":
    known = [
        "all",
        *dict.fromkeys(one.paper for one in catalogue),
        *(one.name for one in catalogue),
    ]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no experiment {unknown[0]}: choose of {', '.join(known)}")
    return [one for one in catalogue if {"all", one.paper, one.name} & set(names)]


def _minutes(budget: str) -> float | None:
    if budget == "full":
        return None
    try:
        minutes = float(budget)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise ValueError(f"--budget is {budget}: give minutes above 0, or full")
    return minutes


def _default_workers() -> int:
    from benchmarks.papers.laboratory import cores, visible_gpus

    return len(visible_gpus()) or cores()


def _report() -> "Callable[[Experiment, int, int, Budget], None]":
    """A line now and then: how far the experiment is, and its minutes."""
    last = 0.0

    def told(experiment: "Experiment", done: int, total: int, budget: "Budget") -> None:
        nonlocal last
        if done < total and time.monotonic() - last < _SECONDS_BETWEEN_LINES:
            return
        last = time.monotonic()
        allowed = "" if budget.allowed is None else f" of {budget.allowed:.1f}"
        print(
            f"{experiment.name}: {done} of {total} jobs asked for so far, {budget.spent:.1f}"
            f"{allowed} min",
            file=sys.stderr,
            flush=True,
        )

    return told
