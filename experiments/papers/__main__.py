"""`python -m experiments.papers`: run the experiments of the five papers within a time budget."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from data.messages import pluralize, printable
from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment
from experiments.papers.experiments import EXPERIMENTS
from experiments.papers.job_runner import JobRunner, cores, visible_gpus
from experiments.papers.page import write_pages
from experiments.papers.run_experiments import run_experiments, stored_sections
from launch.main import run
from launch.output_path import check_writable

_SECONDS_BETWEEN_LINES = 10
_MODULE = "experiments.papers"

app = typer.Typer(name="python -m experiments.papers", add_completion=False)


@app.command()
def papers(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="experiments, papers (000 to 004), or all"),
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
            help="approximate minutes for all named experiments, or full for the published sizes"
        ),
    ] = "60",
    out: Annotated[
        Path,
        typer.Option("-o", "--out", help="folder for results, shards and plots; reused on resume"),
    ] = Path("runs/papers"),
    sections: Annotated[
        Path | None,
        typer.Option(help="folder for the numbers of the pages; default: sections in --out"),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="output page; default: papers.md in --out")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="number of parallel jobs; default: one per GPU, or one per CPU core without a GPU",
        ),
    ] = None,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="repeat measurements from older code, another torch version or another machine",
        ),
    ] = False,
    page_only: Annotated[
        bool,
        typer.Option("--page-only", help="write the page from stored results without measuring"),
    ] = False,
) -> None:
    """Reproduce the papers' experiments and write a page that compares the results with theirs.

    Without a name, list the experiments. Stored results are not measured again: run the same
    command to resume an interrupted run. Results measured with older code are still used, and the
    page marks them.
    """
    if page_only and (names or again):
        raise ValueError("--page-only cannot be combined with names or --again: remove them")
    if not names and not page_only:
        for experiment in EXPERIMENTS:
            print(f"{experiment.name}  {experiment.title}, designed for {experiment.minutes:g} min")
        return
    chosen = _chosen(EXPERIMENTS, names or [])
    minutes = _minutes(budget)
    _check_data(chosen, data)
    written = page or out / "papers.md"
    if out.is_file():
        raise NotADirectoryError(f"{out} is a file: pass a folder with --out")
    if written.is_dir():
        raise IsADirectoryError(f"{written} is a folder: pass a file with --page")
    for folder in (out, written.parent):
        folder.mkdir(parents=True, exist_ok=True)
    check_writable(out / "results.json", "--out")
    check_writable(written, "--page")

    def write() -> int:
        """Write the pages, unless there are no sections, and return the number of sections."""
        found = stored_sections(out, EXPERIMENTS, kept=sections)
        if found:
            write_pages(found, written, plots=out / "plots")
        return len(found)

    if page_only:
        number = write()
        if not number:
            raise ValueError(
                f"{sections or out} contains no finished experiments: run "
                f"python -m {_MODULE} all --out {out}"
            )
    else:
        opened = JobRunner(
            data.resolve(), out.resolve(), workers=workers or _default_workers(), again=again
        )
        with opened as runner:
            try:
                run_experiments(chosen, runner, minutes, _report(), kept=sections)
            finally:
                # After an error, the page contains the experiments that finished before it.
                number = write()
    print(printable(f"{written}: {pluralize(number, 'experiment')}"))


def _check_data(chosen: list[Experiment], data: Path) -> None:
    """Raise FileNotFoundError for missing data before the long measurements start."""
    for experiment in chosen:
        for needed in experiment.needs:
            if not (data / needed).exists():
                raise FileNotFoundError(
                    f"{experiment.name} needs {needed}, but {data / needed} does not exist: "
                    "pass the folder that contains it with --data"
                )


def _chosen(catalog: tuple[Experiment, ...], names: list[str]) -> list[Experiment]:
    known = [
        "all",
        *dict.fromkeys(experiment.paper for experiment in catalog),
        *(experiment.name for experiment in catalog),
    ]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown experiment {unknown[0]}: choose from {', '.join(known)}")
    return [one for one in catalog if {"all", one.paper, one.name} & set(names)]


def _minutes(budget: str) -> float | None:
    if budget == "full":
        return None
    try:
        minutes = float(budget)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise ValueError(f"--budget is {budget}: pass a number of minutes above 0, or full")
    return minutes


def _default_workers() -> int:
    return len(visible_gpus()) or cores()


def _report() -> Callable[[Experiment, int, int, Budget], None]:
    """Return a callback that prints finished jobs, elapsed minutes and used budget every 10 s.

    A job is charged to the budget when it ends, and so is each stored result that is used. While a
    long job runs, only the elapsed time changes.
    """
    last = began = 0.0
    current = ""

    def print_progress(experiment: Experiment, done: int, total: int, budget: Budget) -> None:
        nonlocal last, began, current
        now = time.monotonic()
        if experiment.name != current:
            current, began = experiment.name, now
        if done < total and now - last < _SECONDS_BETWEEN_LINES:
            return
        last = now
        allowed = "" if budget.allowed is None else f" of {budget.allowed:.1f}"
        print(
            f"{experiment.name}: {done} of {total} jobs requested so far are finished, "
            f"{(now - began) / 60:.1f} min elapsed, budget used {budget.spent:.1f}{allowed} min",
            file=sys.stderr,
            flush=True,
        )

    return print_progress


if __name__ == "__main__":
    run(app)
