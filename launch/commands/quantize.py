"""`kway quantize`: writes a bundle whose backbone runs in bf16 or int8 on CPUs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from data.messages import kway_command, pluralize, printable
from data.remote.config import folder_or_url
from launch.commands.calibrate import (
    BatchSize,
    Confidence,
    LabeledShards,
    LoaderProcesses,
    Recalls,
    SplitName,
    features_progress,
)
from launch.commands.export import check_promises, print_kinds
from launch.options import AllowImport
from launch.output_path import explain_write_errors


def quantize(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="folder of a float32 bundle")],
    shards: LabeledShards,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder of the new bundle")],
    precision: Annotated[
        Literal["bf16", "int8"],
        typer.Option(help="precision of the backbone; int8 requires the extra `onnx`"),
    ],
    split: SplitName = "test",
    recall: Recalls = None,
    confidence: Confidence = 0.9,
    batch: BatchSize = 64,
    workers: LoaderProcesses = 0,
    allow_import: AllowImport = None,
) -> None:
    """Write a bundle whose backbone runs in bf16 or int8 on CPUs, with thresholds for its scores.

    Uses the labeled shards to compute the thresholds, the ranges of int8 values, and a comparison
    with float32, which it prints. Classes are matched by name.
    """
    check_promises(recall, confidence)
    if out.exists():
        raise ValueError(f"{out} already exists: remove it, or choose another folder with --out")
    from trainer.bundle.calibration import CalibrationOptions
    from trainer.bundle.quantization import quantize as quantize_bundle

    options = CalibrationOptions(
        split=split,
        recalls=tuple(sorted(set(recall))) if recall else CalibrationOptions.recalls,
        confidence=confidence,
        batch=batch,
        workers=workers,
        allow_imports=allow_import or (),
    )
    with features_progress() as progress, explain_write_errors(out, "--out"):
        found = quantize_bundle(
            bundle, folder_or_url(shards), out, precision, options, progress=progress
        )
    calibration = found.calibration
    print(
        f"{pluralize(calibration.num_samples, 'sample')} of {calibration.num_classes:,} classes, "
        f"top-1 accuracy {calibration.accuracy:.2%} in {precision}, {found.float32_accuracy:.2%} "
        f"in float32"
    )
    print(
        f"same top-1 class {found.agreement:.2%}, largest difference of a score "
        f"{found.largest_difference:.4g}"
    )
    print_kinds(calibration.thresholds)
    print(f"{printable(str(out))} is ready: {kway_command('serve', out)}")
