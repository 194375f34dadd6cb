"""`kway index`: computes the features of a collection and stores them as a gallery."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from data.messages import pluralize, printable
from launch.options import AllowImport
from launch.output_path import explain_write_errors
from launch.terminal import progress, seconds_since

if TYPE_CHECKING:
    from serving.galleries.building import IndexResult


def index(
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="bundle folder (`kway export`, `kway import`)")
    ],
    collection: Annotated[
        Path,
        typer.Argument(
            metavar="COLLECTION",
            help="folder of images or, for a text model, a file with one text per line",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder of the gallery")],
    batch_size: Annotated[
        int, typer.Option(help="number of texts or image crops per forward pass", min=1)
    ] = 32,
    workers: Annotated[
        int | None,
        typer.Option(help="number of decoding threads; default: one per core", min=1),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="device on which the model runs")
    ] = "cpu",
    thumbnails: Annotated[
        bool, typer.Option("--thumbnails/--no-thumbnails", help="store thumbnails of the images")
    ] = True,
    strict: Annotated[bool, typer.Option("--strict", help="fail if a file cannot be read")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="replace the gallery even if it was created from another collection"
        ),
    ] = False,
    allow_import: AllowImport = None,
) -> None:
    """Create a gallery, or replace it once the new one is complete."""
    # Import here, so that other commands start quickly.
    from serving.galleries.building import index_collection
    from serving.galleries.collection import open_collection
    from serving.model import Model
    from trainer.bundle.bundle import Bundle

    started = time.monotonic()
    with Bundle.open(bundle) as opened:
        reads = opened.spec.reads
        listed = open_collection(collection, reads)
        opened.verify(class_weights=False)
        model = Model(opened, device=device, allow_imports=tuple(allow_import or ()))
        model.self_check()
        with (
            explain_write_errors(out, "--out"),
            progress("indexing", reads) as report,
        ):
            done = index_collection(
                model,
                listed,
                out,
                batch_size=batch_size,
                threads=workers,
                thumbnails=thumbnails,
                strict=strict,
                force=force,
                report=report,
            )
    _print_result(out, done, reads, started)


def _print_result(out: Path, done: "IndexResult", reads: str, started: float) -> None:
    item = reads.removesuffix("s")
    if done.ignored:
        others = pluralize(done.ignored, "file")
        print(f"note: ignored {others} without an image extension", file=sys.stderr)
    for name, reason in done.unreadable:
        print(printable(f"skipped: {name}: {reason}"), file=sys.stderr)
    if done.info.unreadable:
        bad = pluralize(done.info.unreadable, f"unreadable {item}")
        where = out / "unreadable.jsonl"
        print(printable(f"warning: skipped {bad}, listed in {where}"), file=sys.stderr)
    size = sum(file.bytes for file in done.info.files.values()) / 1e6
    print(
        printable(
            f"{out}: {pluralize(done.info.num_items, item)}, {size:,.1f} MB, "
            f"{seconds_since(started)}"
        )
    )
