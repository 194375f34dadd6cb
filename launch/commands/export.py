"""`kway export`: a run's newest model as a bundle that `kway serve` and `kway query` open."""

from pathlib import Path
from typing import Annotated

import typer

from launch.commands.place import written_to
from launch.wording import printable


def export(
    run: Annotated[Path, typer.Argument(help="a run's folder")],
    out: Annotated[Path, typer.Option("--out", "-o", help="the bundle's folder")],
    force: Annotated[bool, typer.Option("--force", help="replace an existing bundle")] = False,
) -> None:
    """Write a run's newest model as a bundle."""
    if out.exists() and not force:
        raise ValueError(
            f"{out} exists already: remove it, name another with --out, or replace it with --force"
        )
    from trainer.export import export_run
    from trainer.world import open_world

    with open_world("cpu") as world, written_to(out, "--out"):
        export_run(run, out, world, force=force)
    print(printable(f"{out} is ready: kway serve {out}"))
