"""`kway report`: compares runs with plots and tables in a single HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from data.messages import pluralize, printable
from launch.output_path import check_writable, explain_write_errors


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="folders of runs")],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="output HTML file; an existing file is replaced")
    ] = Path("report.html"),
) -> None:
    """Compare runs with plots and tables on a single, self-contained HTML page.

    Runs may be in progress, interrupted or damaged. The page lists the files that could not be
    read.
    """
    from data.files import commit
    from launch.report.page import report_page
    from launch.report.reading import read_runs

    found = read_runs(runs)
    check_writable(out, "--out")
    content = report_page(found).encode("utf-8", errors="backslashreplace")
    with explain_write_errors(out, "--out"):
        commit(out, content)
    for run in found:
        for problem in run.problems:
            print(printable(f"{run.letter} {run.name}: {problem}"))
    print(f"{out}: {pluralize(len(found), 'run')}, {len(content) / 1e6:.1f} MB")
