"""`kway quantize`: writes a bundle whose backbone runs in bf16 or int8 on CPUs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from data.messages import kway_command, pluralize, printable
from data.remote.config import folder_or_url
from launch.commands.calibrate import LabeledShards
from launch.commands.export import print_kinds
from launch.options import AllowImport, Given, build, options_of, with_options
from launch.output_path import explain_write_errors
from launch.terminal import progress
from trainer.bundle.calibration_options import CalibrationOptions


def quantize(
    given: Given,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="folder of a float32 bundle")],
    shards: LabeledShards,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder of the new bundle")],
    precision: Annotated[
        Literal["bf16", "int8"],
        typer.Option(help="precision of the backbone; int8 requires the extra `onnx`"),
    ],
    allow_import: AllowImport = None,
) -> None:
    """Write a bundle whose backbone runs in bf16 or int8 on CPUs, with thresholds for its scores.

    Uses the labeled shards to compute the thresholds, the ranges of int8 values, and a comparison
    with float32, which it prints. Classes are matched by name.
    """
    options = build(CalibrationOptions, given, allow_imports=allow_import or ())
    if out.exists():
        raise ValueError(f"{out} already exists: remove it, or choose another folder with --out")
    from trainer.bundle.quantization import quantize as quantize_bundle

    with progress("computing features") as report, explain_write_errors(out, "--out"):
        found = quantize_bundle(
            bundle, folder_or_url(shards), out, precision, options, progress=report
        )
    calibration = found.calibration
    print(
        f"{pluralize(calibration.num_samples, 'sample')} of {calibration.num_classes:,} classes, "
        f"{calibration.measure} {calibration.accuracy:.2%} in {precision}, "
        f"{found.float32_accuracy:.2%} in float32"
    )
    print(
        f"same top-1 class {found.agreement:.2%}, largest difference of a score "
        f"{found.largest_difference:.4g}"
    )
    print_kinds(calibration.thresholds)
    print(f"{printable(str(out))} is ready: {kway_command('serve', out)}")


_OPTIONS = options_of(CalibrationOptions)
_SHARED = {name: _OPTIONS[name] for name in ("split", "recalls", "confidence", "batch", "workers")}
command = with_options(quantize, _SHARED)
