"""`python -m benchmarks.papers`: the experiments of the five papers within a budget."""

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.machine import machine
from benchmarks.papers.budget import Budget
from benchmarks.papers.conduct import conduct, kept_sections
from benchmarks.papers.experiment import Experiment
from benchmarks.papers.experiments import EXPERIMENTS
from benchmarks.papers.laboratory import Laboratory, cores, visible_gpus
from benchmarks.papers.page import write_page
from data.messages import pluralize, printable
from launch.main import run
from launch.output_path import check_writable

_SECONDS_BETWEEN_LINES = 10
_MODULE = "benchmarks.papers"

app = typer.Typer(name="python -m benchmarks.papers", add_completion=False)


@app.command()
def papers(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="all, a paper (000 to 004, beyond), or experiments"),
    ] = None,
    data: Annotated[
        Path,
        typer.Option(
            help="folder with mnist/, cifar-100-binary.tar.gz, tweeteval-emoji/, emoji2vec/"
        ),
    ] = Path("data"),
    budget: Annotated[
        str,
        typer.Option(
            help="about how many minutes for all named experiments; or full: published sizes"
        ),
    ] = "60",
    out: Annotated[
        Path,
        typer.Option("-o", "--out", help="results, shards and figures, kept to resume from"),
    ] = Path("runs/papers"),
    page: Annotated[Path | None, typer.Option(help="the page; default: papers.md in --out")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="runs at a time; default: GPUs, or cores without any")
    ] = None,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="repeat measurements of older code, another torch or another machine"
        ),
    ] = False,
    page_only: Annotated[
        bool,
        typer.Option("--page-only", help="measure nothing: write the page from kept results"),
    ] = False,
) -> None:
    """Repeat the experiments of the papers and write the page that compares the results.

    Without a name it lists them. Kept results are not measured again: run the same command to
    resume an interrupted run. Results of older code are used and marked on the page.
    """
    if page_only and (names or again):
        raise ValueError("--page-only measures nothing: leave out the names and --again")
    if not names and not page_only:
        for one in EXPERIMENTS:
            print(f"{one.name}  {one.title}, {one.minutes:g} min of an hour")
        return
    chosen = _chosen(EXPERIMENTS, names or [])
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
    given = [*(names or []), "--data", "DATA", "--budget", budget, *(["--again"] if again else [])]
    command = shlex.join(["python", "-m", _MODULE, *(["--page-only"] if page_only else given)])

    def write() -> int:
        """Returns the number of experiments on the page; 0 if there is nothing to write."""
        sections = kept_sections(out, EXPERIMENTS)
        if sections:
            write_page(
                sections,
                written,
                catalogue=EXPERIMENTS,
                pictures=out / "pictures",
                command=command,
                machine=where,
            )
        return len(sections)

    if page_only:
        number = write()
        if not number:
            raise ValueError(
                f"no experiment has ended in {out}: run python -m {_MODULE} all --out {out}"
            )
    else:
        opened = Laboratory(
            data.resolve(), out.resolve(), workers=workers or _default_workers(), again=again
        )
        with opened as laboratory:
            try:
                conduct(chosen, laboratory, minutes, _report())
            finally:
                # Experiments that ended before an error are on the page.
                number = write()
    print(printable(f"{written}: {pluralize(number, 'experiment')}"))


def _check_data(chosen: list[Experiment], data: Path) -> None:
    """Raise an error for missing data before anything is measured, because that takes long."""
    for one in chosen:
        for needed in one.needs:
            if not (data / needed).exists():
                raise FileNotFoundError(
                    f"{one.name} needs {needed} as published in --data, and {data / needed} does "
                    "not exist: pass the folder that contains it"
                )


def _chosen(catalogue: tuple[Experiment, ...], names: list[str]) -> list[Experiment]:
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
        raise ValueError(f"--budget is {budget}: pass minutes above 0, or full")
    return minutes


def _default_workers() -> int:
    return len(visible_gpus()) or cores()


def _report() -> Callable[[Experiment, int, int, Budget], None]:
    """Prints a line every few seconds: jobs done, minutes elapsed, minutes of the budget used.

    The budget is charged when a job ends, including kept results, so only the elapsed time shows
    that a long job is running.
    """
    last = began = 0.0
    current = ""

    def told(experiment: Experiment, done: int, total: int, budget: Budget) -> None:
        nonlocal last, began, current
        now = time.monotonic()
        if experiment.name != current:
            current, began = experiment.name, now
        if done < total and now - last < _SECONDS_BETWEEN_LINES:
            return
        last = now
        allowed = "" if budget.allowed is None else f" of {budget.allowed:.1f}"
        print(
            f"{experiment.name}: {done} of {total} jobs asked for so far, "
            f"{(now - began) / 60:.1f} min elapsed, budget used {budget.spent:.1f}{allowed} min",
            file=sys.stderr,
            flush=True,
        )

    return told


if __name__ == "__main__":
    run(app)
