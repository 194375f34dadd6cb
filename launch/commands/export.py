"""`kway export`: exports a run's newest model as a bundle for `kway serve` and `kway query`."""

from pathlib import Path
from typing import Annotated

import typer

from data.messages import printable
from launch.options import AllowImport
from launch.output_path import explain_write_errors


def export(
    run: Annotated[Path, typer.Argument(help="a run's folder")],
    out: Annotated[Path, typer.Option("--out", "-o", help="the bundle's folder")],
    recall: Annotated[
        list[float] | None,
        typer.Option(help="also hold thresholds for this recall, above 0 and at most 1; repeat"),
    ] = None,
    min_positives: Annotated[
        int | None,
        typer.Option(
            help="a class with fewer validation samples takes the pooled threshold; default: what "
            "the recall needs, 9 for 0.9 and 99 for 0.99",
            min=1,
        ),
    ] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="also write the backbone for onnxruntime")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="replace an existing bundle")] = False,
    allow_import: AllowImport = None,
) -> None:
    """Write a run's newest model as a bundle."""
    for one in recall or ():
        if not 0 < one <= 1:
            raise ValueError(f"--recall {one:g}: give one above 0 and at most 1")
    if out.exists() and not force:
        raise ValueError(
            f"{out} exists already: remove it, name another with --out, or replace it with --force"
        )
    from trainer.bundle.export import export_run
    from trainer.world import open_world

    with open_world("cpu") as world, explain_write_errors(out, "--out"):
        export_run(
            run,
            out,
            world,
            recalls=recall or (),
            min_positives=min_positives,
            onnx=onnx,
            force=force,
            allow_imports=allow_import or (),
        )
    print(printable(f"{out} is ready: kway serve {out}"))
