"""`kway index`: computes the features of a collection once and stores them as a gallery."""

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
    bundle: Annotated[Path, typer.Argument(help="bundle folder, made by `kway export`")],
    collection: Annotated[
        Path, typer.Argument(help="folder of images; for a model of texts: a file, one a line")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="the gallery's folder")],
    batch_size: Annotated[
        int, typer.Option(help="texts, or crops of images, in one forward pass", min=1)
    ] = 32,
    workers: Annotated[
        int | None, typer.Option(help="threads that decode; default: one a core", min=1)
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="what computes")] = "cpu",
    thumbnails: Annotated[
        bool, typer.Option("--thumbnails/--no-thumbnails", help="keep small images to show")
    ] = True,
    strict: Annotated[
        bool, typer.Option("--strict", help="fail where a file cannot be read")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="also where the gallery was made of another folder")
    ] = False,
    allow_import: AllowImport = None,
) -> None:
    """Make a gallery, or bring it up to date: only what is new or changed is computed."""
    # Import here, so that other commands start quickly.
    from serving.galleries.building import IndexOptions, index_collection
    from serving.galleries.collection import open_collection
    from serving.model import Model
    from trainer.bundle.bundle import Bundle

    started = time.monotonic()
    how = IndexOptions(batch_size=batch_size, thumbnails=thumbnails, strict=strict, force=force)
    if workers is not None:
        how = IndexOptions(**{**vars(how), "threads": workers})
    with Bundle.open(bundle) as opened:
        listed = open_collection(collection, opened.spec.reads)
        opened.verify(class_weights=False)
        model = Model(opened, device=device, allow_imports=allow_import or ())
        model.self_check()
        with (
            explain_write_errors(out, "--out"),
            progress("indexing", model.reads) as computing,
            progress("writing", model.reads) as writing,
        ):
            done = index_collection(model, listed, out, how, computing=computing, writing=writing)
    _tell(out, done, model.reads, started)


def _tell(out: Path, done: "IndexResult", reads: str, started: float) -> None:
    item = reads.removesuffix("s")
    if done.ignored:
        others = pluralize(done.ignored, "other file")
        print(f"note: ignoring {others}, by the name no image", file=sys.stderr)
    for name, reason in done.unreadable:
        print(printable(f"left out: {name}: {reason}"), file=sys.stderr)
    if done.info.unreadable:
        bad = pluralize(done.info.unreadable, f"unreadable {item}")
        where = out / "unreadable.jsonl"
        print(printable(f"warning: left out {bad}, listed in {where}"), file=sys.stderr)
    size = sum(file.bytes for file in done.info.files.values()) / 1e6
    print(
        printable(
            f"{out}: {pluralize(done.info.num_items, item)}, {done.computed:,} computed, "
            f"{done.reused:,} reused, {done.dropped:,} dropped, {size:,.1f} MB, "
            f"{seconds_since(started)}"
        )
    )
