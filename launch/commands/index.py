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
            "--force", help="update the gallery even if it was created from another collection"
        ),
    ] = False,
    approximate: Annotated[
        bool | None,
        typer.Option(
            "--index/--no-index",
            help="build an approximate index, which makes searches of large galleries faster "
            "(default: for more than 200,000 items)",
        ),
    ] = None,
    allow_import: AllowImport = None,
) -> None:
    """Create or update a gallery. An update computes features only of new and changed items."""
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
                index=approximate,
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
            f"{out}: {pluralize(done.info.num_items, item)}, {done.computed:,} computed, "
            f"{done.reused:,} unchanged, {done.dropped:,} removed, {size:,.1f} MB, "
            f"{seconds_since(started)}"
        )
    )
    if (index := done.info.index) is not None:
        recall = ", ".join(f"{share:.3f} at {depth}" for depth, share in index.recall.items())
        use = "" if index.is_default else ", too low: by default, searches do not use the index"
        print(
            printable(
                f"{out}: approximate index of {index.num_lists:,} lists, of which a search reads "
                f"{index.num_probes:,}; recall {recall}{use}"
            )
        )
