"""`kway doctor`: checks whether this machine can run training, and suggests fixes."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data.messages import pluralize, printable
from launch.options import AllowImport
from launch.shipped import RECIPE

if TYPE_CHECKING:
    from launch.doctor import Finding, Workload

_COLORS = {"ok": "green", "warning": "yellow", "error": "bold red"}
_LEVEL_WIDTH, _TOPIC_WIDTH = 7, 13


def doctor(
    recipe: Annotated[Path | None, RECIPE] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="recipe overrides, such as data.workers=8"),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="folder for runs; default: the recipe's run folder, or the current directory"
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=2, help="ranks on this machine; default: one per GPU, at least 2"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="rendezvous port to check, for training on several machines"
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="another machine to check; can be repeated"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    allow_import: AllowImport = None,
) -> None:
    """Check whether this machine can run training. Exits with code 1 if training would fail."""
    from launch.doctor import examine

    workload = _workload(
        recipe, overrides or [], allow_import or [], run, nproc, port, tuple(peer or ())
    )
    console = Console(stderr=as_json)
    found = []
    with _shown_progress(console) as starting:
        for finding in examine(workload, starting):
            found.append(finding)
            if not as_json:
                _print(console, finding)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
    errors, warnings = (sum(f.level == level for f in found) for level in ("error", "warning"))
    if not as_json:
        summary = f"{pluralize(errors, 'error')}, {pluralize(warnings, 'warning')}"
        print(summary if errors or warnings else "no problems found")
    raise typer.Exit(1 if errors else 0)


def _workload(
    path: Path | None,
    overrides: list[str],
    allow_imports: list[str],
    run: Path | None,
    nproc: int | None,
    port: int | None,
    peers: tuple[str, ...],
) -> "Workload":
    from dataclasses import replace

    from launch.doctor.check import Workload, workload_of
    from launch.doctor.network import split_address

    for peer in peers:
        split_address(peer)
    ranks = nproc or max(2, _num_gpus())
    if path is None:
        return Workload(run or Path(), ranks, port=port, peers=peers)
    try:
        from launch.recipe_inputs import local_inputs
        from trainer.recipe import load_recipe
    except ImportError as error:
        raise ValueError(
            f"reading {path} requires torch ({error}): run kway doctor without a recipe first"
        ) from error
    resolved = load_recipe(path, overrides, allow_imports=allow_imports)
    workload = workload_of(resolved, ranks=ranks, port=port, peers=peers)
    return replace(workload, run=run or workload.run, inputs=tuple(local_inputs(resolved, path)))


def _num_gpus() -> int:
    """Count the GPUs without importing torch, because the installation of torch may be broken."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


@contextmanager
def _shown_progress(console: Console) -> "Iterator[Callable[[str], None]]":
    """Show the name of the current check on the last line if the output is a terminal."""
    if not console.is_terminal:
        yield lambda name: None
        return
    with console.status("") as status:
        yield lambda name: status.update(f"checking {name} …")


def _print(console: Console, finding: "Finding") -> None:
    """Print a finding in columns if the output is a terminal, otherwise on one line."""
    level, topic = finding.level, printable(finding.topic)
    found, remedy = printable(finding.found), printable(finding.remedy)
    if not console.is_terminal:
        print(f"{level}: {topic}: {found}{f'; {remedy}' if remedy else ''}", flush=True)
        return
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LEVEL_WIDTH)
    table.add_column(width=_TOPIC_WIDTH)
    table.add_column(overflow="fold")
    table.add_row(Text(level, style=_COLORS[level]), Text(topic), Text(found))
    if remedy:
        table.add_row("", "", Text(f"-> {remedy}", style="bold"))
    console.print(table)
