"""`kway calibrate`: adds thresholds to a bundle from labeled shards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from data.messages import kway_command, pluralize, printable
from data.remote.config import folder_or_url
from launch.commands.export import check_promises, print_kinds
from launch.options import AllowImport
from launch.output_path import explain_write_errors

# Options that `kway quantize` shares.
LabeledShards = Annotated[
    str, typer.Argument(metavar="SHARDS", help="folder or URL of labeled shards")
]
SplitName = Annotated[str, typer.Option(help="split of the shards")]
Recalls = Annotated[
    list[float] | None,
    typer.Option(
        metavar="FLOAT",
        help="recall for which to compute thresholds (above 0, at most 1); can be repeated; "
        "default: 0.9 and 0.99",
    ),
]
Confidence = Annotated[
    float,
    typer.Option(
        metavar="FLOAT",
        help="confidence of the guarantees and intervals of the thresholds (above 0, below 1)",
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="number of samples per forward pass")]
LoaderProcesses = Annotated[int, typer.Option(min=0, help="number of loader processes")]


def calibrate(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="bundle folder")],
    shards: LabeledShards,
    split: SplitName = "test",
    recall: Recalls = None,
    confidence: Confidence = 0.9,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="folder of the new bundle; default: replace BUNDLE"),
    ] = None,
    batch: BatchSize = 64,
    workers: LoaderProcesses = 0,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="device of the backbone")] = "cpu",
    allow_import: AllowImport = None,
) -> None:
    """Add thresholds to a bundle from labeled shards, or replace them.

    Classes are matched by name. The class weights do not change.
    """
    check_promises(recall, confidence)
    if out is not None and out.exists() and out.resolve() != bundle.resolve():
        raise ValueError(f"{out} already exists: remove it, or choose another folder with --out")
    from trainer.bundle.calibration import CalibrationOptions
    from trainer.bundle.calibration import calibrate as calibrate_bundle

    options = CalibrationOptions(
        split=split,
        confidence=confidence,
        batch=batch,
        workers=workers,
        device=device,
        allow_imports=allow_import or (),
        **({"recalls": tuple(sorted(set(recall)))} if recall else {}),
    )
    target = out or bundle
    with features_progress() as progress, explain_write_errors(target, "--out"):
        found = calibrate_bundle(bundle, folder_or_url(shards), target, options, progress=progress)
    print(
        f"{pluralize(found.num_samples, 'sample')} of {found.num_classes:,} classes, "
        f"top-1 accuracy {found.accuracy:.2%}"
    )
    print_kinds(found.thresholds)
    print(f"{printable(str(target))} has thresholds: {kway_command('serve', target)}")


@contextmanager
def features_progress() -> Iterator[Callable[[int], None]]:
    """Show a progress bar, and yield a function that adds a number of samples to it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_interactive, transient=True) as bar:
        task = bar.add_task("computing features", total=None)
        yield lambda samples: bar.advance(task, samples)
