"""`kway export`: exports a run's newest model as a bundle for `kway serve` and `kway query`."""

from pathlib import Path
from typing import Annotated

import typer

from data.messages import printable
from launch.options import AllowImport
from launch.output_path import explain_write_errors


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder of the bundle")],
    recall: Annotated[
        list[float] | None,
        typer.Option(
            metavar="FLOAT",
            help="additional recall for which to compute thresholds (above 0, at most 1); can be "
            "repeated",
        ),
    ] = None,
    min_positives: Annotated[
        int | None,
        typer.Option(
            help="minimum number of validation samples that a class needs to get its own threshold "
            "instead of the pooled one; default: depends on the recall (9 for 0.9, 99 for 0.99)",
            min=1,
        ),
    ] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="also export the backbone to ONNX, for onnxruntime")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="replace an existing bundle")] = False,
    allow_import: AllowImport = None,
) -> None:
    """Export a run's newest model as a bundle."""
    for value in recall or ():
        if not 0 < value <= 1:
            raise ValueError(f"--recall {value:g}: pass a number above 0 and at most 1")
    if out.exists() and not force:
        raise ValueError(
            f"{out} already exists: remove it, choose another folder with --out, or pass --force "
            "to replace it"
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
