"""`python -m experiments.papers`: run the experiments of the five papers within a time budget."""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

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
# A run is stopped if it takes this much longer than --minutes.
_MINUTES_OVER = 4.0
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
        typer.Option(help="folder with mnist/ and cifar-100-binary.tar.gz"),
    ] = Path("data"),
    minutes: Annotated[
        float, typer.Option(help="minutes for all named experiments, which determine their sizes")
    ] = 60.0,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="train the published networks, for as long as that takes")
    ] = False,
    first_seed: Annotated[
        int, typer.Option(min=0, help="first seed; another one shows whether results are stable")
    ] = 0,
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
    page_only: Annotated[
        bool,
        typer.Option("--page-only", help="write the page from stored results without measuring"),
    ] = False,
) -> None:
    """Reproduce the papers' experiments and write a page that compares the results with theirs.

    Without a name, list the experiments. Stored results are not measured again: run the same
    command to resume an interrupted run, or one that ran out of time. Results of older code or of
    another version of torch are not used.
    """
    if page_only and names:
        raise ValueError("--page-only cannot be combined with names: remove them")
    if not names and not page_only:
        for experiment in EXPERIMENTS:
            size = "needs --gpu" if experiment.gpu else f"designed for {experiment.minutes:g} min"
            print(f"{experiment.name}  {experiment.title}, {size}")
        return
    chosen = _chosen(EXPERIMENTS, names or [], gpu=gpu)
    if not 0 < minutes < float("inf"):
        raise ValueError(f"--minutes is {minutes:g}: pass a number above 0")
    if gpu and chosen and not visible_gpus():
        raise ValueError("--gpu: torch cannot find a GPU: run the command on a machine with one")
    _check_data(chosen, data)
    written = page or out / "papers.md"
    if out.is_file():
        raise NotADirectoryError(f"{out} is a file: pass a folder with --out")
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
        workers = workers or len(visible_gpus()) or cores()
        opened = JobRunner(data.resolve(), out.resolve(), workers=workers)
        signal.signal(signal.SIGTERM, _terminate)
        deadline = None if gpu else time.monotonic() + 60 * (minutes + _MINUTES_OVER)
        try:
            with opened as runner:  # terminates running jobs after an error, also if time is up
                try:
                    run_experiments(
                        *(chosen, runner, minutes, _report(deadline)),
                        kept=sections,
                        first_seed=first_seed,
                    )
                finally:
                    # After an error, the page contains the experiments that finished before it.
                    number = write()
        except TimeoutError as error:
            print(f"{error}: run the same command again to resume", file=sys.stderr)
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


def _terminate(_number: int, _frame: object) -> NoReturn:
    """Exit as after an error, so that workers end and the page is written."""
    sys.exit(128 + signal.SIGTERM)


def _chosen(catalog: tuple[Experiment, ...], names: list[str], *, gpu: bool) -> list[Experiment]:
    """Return the named experiments; `all` and papers name those with or those without a GPU."""
    known = [
        "all",
        *dict.fromkeys(experiment.paper for experiment in catalog),
        *(experiment.name for experiment in catalog),
    ]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown experiment {unknown[0]}: choose from {', '.join(known)}")
    for one in catalog:
        if one.name in names and one.gpu != gpu:
            fix = "remove" if gpu else "add"
            needs = "does not need" if gpu else "needs"
            raise ValueError(f"{one.name} {needs} a GPU: {fix} --gpu")
    return [one for one in catalog if one.gpu == gpu and {"all", one.paper, one.name} & set(names)]


def _report(deadline: float | None) -> Callable[[Experiment, int, int, Budget], None]:
    """Return a callback that prints finished jobs, elapsed minutes and used budget every 10 s.

    A job is charged to the budget when it ends, and so is each stored result that is used. While a
    long job runs, only the elapsed time changes. The callback raises TimeoutError after `deadline`.
    """
    last = began = 0.0
    current = ""

    def print_progress(experiment: Experiment, done: int, total: int, budget: Budget) -> None:
        nonlocal last, began, current
        now = time.monotonic()
        if deadline is not None and now > deadline:
            raise TimeoutError(f"the time is up during {experiment.name}")
        if experiment.name != current:
            current, began = experiment.name, now
        if done < total and now - last < _SECONDS_BETWEEN_LINES:
            return
        last = now
        print(
            f"{experiment.name}: {done} of {total} jobs requested so far are finished, "
            f"{(now - began) / 60:.1f} min elapsed, budget used {budget.spent:.1f} of "
            f"{max(budget.allowed, budget.minutes):.1f} min",
            file=sys.stderr,
            flush=True,
        )

    return print_progress


if __name__ == "__main__":
    run(app)
