"""`kway export`: exports a run's newest model as a bundle for `kway serve` and `kway query`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.messages import kway_command, printable
from launch.options import AllowImport
from launch.output_path import check_new, explain_write_errors

if TYPE_CHECKING:
    from trainer.bundle.threshold_file import ClassThresholds


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder of the bundle")],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="also export the backbone to ONNX, for onnxruntime")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="replace an existing bundle")] = False,
    allow_import: AllowImport = None,
) -> None:
    """Export a run's newest model as a bundle."""
    check_new(out, force=force)
    from trainer.bundle.export import export_run
    from trainer.world import open_world

    with open_world("cpu") as world, explain_write_errors(out, "--out"):
        thresholds = export_run(
            run,
            out,
            world,
            onnx=onnx,
            force=force,
            allow_imports=allow_import or (),
        )
    print_kinds(thresholds)
    print(f"{printable(str(out))} is ready: {kway_command('serve', out)}")


def print_kinds(thresholds: "ClassThresholds") -> None:
    """Print how many classes have a threshold of each kind, one line per recall."""
    for column, entry in enumerate(thresholds.recalls):
        kinds = thresholds.num_of_kind(column).items()
        counts = ", ".join(f"{num:,} {kind}" for kind, num in kinds if num)
        print(f"thresholds for recall {entry.recall:g}: {counts}")
