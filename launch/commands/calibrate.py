"""`kway calibrate`: adds thresholds to a bundle from labeled shards."""

from pathlib import Path
from typing import Annotated

import typer

from data.messages import kway_command, pluralize, printable
from data.remote.config import folder_or_url
from launch.commands.export import print_kinds
from launch.options import AllowImport, Given, build, options_of, with_options
from launch.output_path import explain_write_errors
from launch.terminal import progress
from trainer.bundle.calibration_options import CalibrationOptions

LabeledShards = Annotated[
    str, typer.Argument(metavar="SHARDS", help="folder or URL of labeled shards")
]


def calibrate(
    given: Given,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="bundle folder")],
    shards: LabeledShards,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="folder of the new bundle; default: replace BUNDLE"),
    ] = None,
    allow_import: AllowImport = None,
) -> None:
    """Add thresholds to a bundle from labeled shards, or replace them.

    Classes are matched by name. The class weights do not change.
    """
    options = build(CalibrationOptions, given, allow_imports=allow_import or ())
    if out is not None and out.exists() and out.resolve() != bundle.resolve():
        raise ValueError(f"{out} already exists: remove it, or choose another folder with --out")
    from trainer.bundle.calibration import calibrate as calibrate_bundle

    target = out or bundle
    with progress("computing features") as report, explain_write_errors(target, "--out"):
        found = calibrate_bundle(bundle, folder_or_url(shards), target, options, progress=report)
    print(
        f"{pluralize(found.num_samples, 'sample')} of {found.num_classes:,} classes, "
        f"{found.measure} {found.accuracy:.2%}"
    )
    print_kinds(found.thresholds)
    print(f"{printable(str(target))} has thresholds: {kway_command('serve', target)}")


command = with_options(calibrate, options_of(CalibrationOptions))
