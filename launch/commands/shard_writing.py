"""What the commands share that write shards: their options, the writing, and its last lines."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.shards.manifest import Manifest
from launch.commands.place import written_to
from launch.progress import progress
from launch.wording import counted, printable, seconds_since

if TYPE_CHECKING:
    from data.skipped import Skipped
    from data.sources import Source
    from data.sources.label_vectors import WithLabelVectors

Out = Annotated[Path, typer.Option("--out", "-o", help="folder that the shards go to")]
Workers = Annotated[int | None, typer.Option(min=0, help="processes; default: one a core")]
SAMPLES_PER_SHARD = 10_000
PerShard = Annotated[int, typer.Option(min=1, help="samples a shard")]

_SAMPLE = {"image": "picture", "text": "text"}


def write(
    source: "Source",
    out: Path,
    *,
    samples_per_shard: int = SAMPLES_PER_SHARD,
    workers: int | None = None,
    drop_duplicates: bool = False,
    vectors: "WithLabelVectors | None" = None,
    notes: Callable[[], Iterable[str]] = tuple,
    ignored: Sequence["Skipped"] = (),
) -> None:
    """Write shards of `source` and print a summary; `notes` is called after writing.

    vectors: the source with label vectors from a file, instead of its own; ignored: files that the
    source does not read.
    """
    from data.shards.writer import write_shards

    started = time.monotonic()
    with progress("writing") as report, written_to(out, "--out"):
        written = write_shards(
            vectors or source,
            out,
            samples_per_shard=samples_per_shard,
            workers=workers,
            drop_duplicates=drop_duplicates,
            ignored=ignored,
            report=report,
        )
    manifest = written.manifest
    if written.skipped is not None:
        print_skipped(written.skipped)
    if written.complete_before:
        print(printable(f"{out} is complete already: {summary(manifest)}"))
        return
    for note in chain(notes(), vectors.notes() if vectors else ()):
        print(printable(f"note: {note}"), file=sys.stderr)
    if written.resumed:
        print(f"stood already: {counted(written.resumed, 'shard')}")
    if written.left_out:
        bad = counted(written.left_out, f"bad {_SAMPLE[manifest.modality]}")
        print(f"warning: left out {bad}", file=sys.stderr)
    if written.duplicates:
        print(f"kept out of training: {counted(written.duplicates, 'duplicate')} of other splits")
    print(printable(f"{out}: {summary(manifest)}, {seconds_since(started)}"))


def print_skipped(path: Path) -> None:
    """Print the path of the file that names everything that is not in the shards."""
    print(printable(f"skipped files and samples, with reasons: {path}"), file=sys.stderr)


def summary(manifest: Manifest) -> str:
    """Samples of each split, classes, shards and their size: one line."""
    splits = " + ".join(
        f"{sum(shard.samples for shard in manifest.of_split(split)):,} {split}"
        for split in manifest.splits
    )
    size = sum(shard.bytes for shard in manifest.shards) / 1e6
    return (
        f"{splits} samples, {len(manifest.classes):,} classes, "
        f"{counted(len(manifest.shards), 'shard')}, {size:,.1f} MB"
    )
