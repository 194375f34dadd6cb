"""`kway index`: computes the features of a collection and stores them as a gallery."""

import json
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import typer

from data.messages import pluralize, printable
from launch.options import AllowImport
from launch.output_path import explain_write_errors
from launch.terminal import progress, seconds_since

_MAX_NAMED = 5  # unreadable items


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
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="replace the gallery even if it was created from another collection"
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
            info = index_collection(
                model,
                listed,
                out,
                batch_size=batch_size,
                threads=workers,
                thumbnails=thumbnails,
                force=force,
                index=approximate,
                report=report,
            )
    item = reads.removesuffix("s")
    if listed.ignored:
        others = pluralize(listed.ignored, "file")
        print(f"note: ignored {others} without an image extension", file=sys.stderr)
    if info.unreadable:
        file = out / "unreadable.jsonl"
        with file.open() as lines:
            for skipped in map(json.loads, islice(lines, _MAX_NAMED)):
                print(printable("skipped: {name}: {reason}".format(**skipped)), file=sys.stderr)
        bad = pluralize(info.unreadable, f"unreadable {item}")
        print(printable(f"warning: skipped {bad}, listed in {file}"), file=sys.stderr)
    size = sum(file.bytes for file in info.files.values()) / 1e6
    summary = f"{pluralize(info.num_items, item)}, {size:,.1f} MB, {seconds_since(started)}"
    print(printable(f"{out}: {summary}"))
    if (built := info.index) is not None:
        recall = ", ".join(f"{share:.3f} at {depth}" for depth, share in built.recall.items())
        use = "" if built.is_default else ", too low: by default, searches do not use the index"
        print(
            printable(
                f"{out}: approximate index of {built.num_lists:,} lists, of which a search reads "
                f"{built.num_probes:,}; recall {recall}{use}"
            )
        )
