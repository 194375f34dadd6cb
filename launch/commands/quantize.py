"""`kway quantize`: writes a bundle whose backbone runs in bf16 or int8 on CPUs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from data.messages import pluralize, printable
from launch.commands.export import print_kinds
from launch.options import AllowImport
from launch.output_path import explain_write_errors


def quantize(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="bundle folder, in float32")],
    shards: Annotated[
        str, typer.Argument(metavar="SHARDS", help="folder or URL of labeled shards")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder of the new bundle")],
    precision: Annotated[
        Literal["bf16", "int8"],
        typer.Option(help="precision of the backbone; int8 requires kway[onnx]"),
    ],
    split: Annotated[str, typer.Option(help="split of the shards")] = "test",
    recall: Annotated[
        list[float] | None,
        typer.Option(
            metavar="FLOAT",
            help="recall for which to compute thresholds (above 0, at most 1); can be repeated; "
            "default: 0.9 and 0.99",
        ),
    ] = None,
    confidence: Annotated[
        float,
        typer.Option(
            metavar="FLOAT",
            help="confidence of the guarantees and intervals of the thresholds (above 0, below 1)",
        ),
    ] = 0.9,
    batch: Annotated[int, typer.Option(min=1, help="number of samples per forward pass")] = 64,
    workers: Annotated[int, typer.Option(min=0, help="number of loader processes")] = 0,
    allow_import: AllowImport = None,
) -> None:
    """Write a bundle whose backbone runs in bf16 or int8 on CPUs, with thresholds for its scores.

    The labeled shards set the thresholds, the ranges of int8 values, and the comparison with
    float32 that is printed. Classes are matched by name.
    """
    for value in recall or ():
        if not 0 < value <= 1:
            raise ValueError(f"--recall {value:g}: pass a number above 0 and at most 1")
    if not 0 < confidence < 1:
        raise ValueError(f"--confidence {confidence:g}: pass a number above 0 and below 1")
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
    source = shards if "://" in shards else Path(shards)
    with explain_write_errors(out, "--out"):
        found = quantize_bundle(bundle, source, out, precision, options)
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
    print(printable(f"{out} is ready: kway serve {out}"))
