"""What the commands of `kway shard` share: where they run, and what they print about shards."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.messages import pluralize, printable

if TYPE_CHECKING:
    from data.shards.manifest import Manifest

Workers = Annotated[
    int | None, typer.Option(min=0, help="number of processes; default: one per core")
]


@contextmanager
def connected(workers: int | None, ray: str | None) -> Iterator[None]:
    """Keep a connection to the Ray cluster, if there is one, inside the block.

    Raises ValueError if --workers is given too or there is no such cluster. Enter this block before
    anything else, because a ValueError can delete the results of an interrupted run.
    """
    if ray is None:
        yield
        return
    if workers is not None:
        raise ValueError(
            f"--workers {workers} and --ray {ray}: pass only one of them; a Ray cluster runs one "
            "task per CPU"
        )
    from data.ray_pool import ray_cluster

    with ray_cluster(ray):
        yield


def print_skipped(path: Path | str) -> None:
    """Print the path of the file that lists the skipped files and samples."""
    print(printable(f"skipped files and samples, with reasons: {path}"), file=sys.stderr)


def summary(manifest: "Manifest") -> str:
    """Summarize the samples of each split and the number of labels (if they are sets), classes,
    shards and bytes.
    """
    splits = " + ".join(
        f"{sum(shard.samples for shard in manifest.of_split(split)):,} {split}"
        for split in manifest.splits
    )
    size = sum(shard.bytes for shard in manifest.shards) / 1e6
    labels = ""
    if manifest.label_sets:
        labels = f"{sum(shard.labels or 0 for shard in manifest.shards):,} labels, "
    return (
        f"{splits} samples, {labels}{len(manifest.classes):,} classes, "
        f"{pluralize(len(manifest.shards), 'shard')}, {size:,.1f} MB"
    )
