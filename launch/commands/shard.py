"""`kway shard`: sources -> webdataset shards with index and manifest; and a check of them."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data.manifest import Manifest
from launch.commands import shard_images, shard_inspect, shard_text
from launch.commands.shard_images import DropDuplicates

if TYPE_CHECKING:
    from data.writer import Report, Written

app = typer.Typer(help="Turn a source into shards, or look at shards.", no_args_is_help=True)

_SECONDS_BETWEEN_LINES = 10

Out = Annotated[Path, typer.Option("--out", "-o", help="folder that the shards go to")]
Workers = Annotated[int | None, typer.Option(min=0, help="processes; default: one a core")]
PerShard = Annotated[int, typer.Option(min=1, help="samples a shard")]

app.command()(shard_images.imagenet)
app.command()(shard_images.cifar100)
app.command()(shard_images.cifar10)
app.command()(shard_images.mnist)
app.command()(shard_text.tweets)
app.command()(shard_text.table)
app.command()(shard_text.emoji_names)
app.command()(shard_text.check)
app.command()(shard_inspect.verify)
app.command()(shard_inspect.show)
app.command()(shard_inspect.index)


@app.command()
def glyphs(
    out: Out,
    classes: Annotated[
        int | None, typer.Option(min=2, help="only the first N, those of most faces; default: all")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="training pictures a class and face")] = 3,
    size: Annotated[int, typer.Option(min=8, help="side of a picture, pixels")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="of the distortions")] = 0,
    confusables: Annotated[
        Literal["merge", "keep"],
        typer.Option(help="characters that look the same, such as Latin and Greek A: one class?"),
    ] = "merge",
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """Characters drawn from the fonts that matplotlib ships; needs no download."""
    from data.sources import Glyphs
    from data.writer import write_shards

    source = Glyphs(classes, samples=samples, size=size, seed=seed, confusables=confusables)
    _write(
        lambda report: write_shards(
            source, out, samples_per_shard=samples_per_shard, workers=workers, report=report
        ),
        out,
    )


@app.command()
def imagefolder(
    folder: Annotated[
        Path, typer.Argument(help="class folders of pictures, or train/ and test/ of those")
    ],
    out: Out,
    labels: Annotated[
        Path | None, typer.Option(help="lines `file,class` instead of class folders")
    ] = None,
    short_side: Annotated[int, typer.Option(min=1, help="larger pictures shrink to it")] = 256,
    quality: Annotated[int, typer.Option(min=1, max=100, help="of JPEG, for those")] = 90,
    original: Annotated[bool, typer.Option("--original", help="keep bytes as they are")] = False,
    test_fraction: Annotated[
        float, typer.Option(min=0, max=1, help="of pictures held out, where there is no test/")
    ] = 0.1,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="leave out and count what is no picture")
    ] = False,
    drop_duplicates: DropDuplicates = False,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """A folder of pictures of your own."""
    from data.sources import ImageFolder
    from data.writer import write_shards

    source = ImageFolder(
        folder,
        labels=labels,
        short_side=None if original else short_side,
        quality=quality,
        test_fraction=test_fraction,
        skip_bad=skip_bad,
    )
    for note in source.notes():
        print(f"note: {folder}: {note}", file=sys.stderr)
    _write(
        lambda report: write_shards(
            source,
            out,
            samples_per_shard=samples_per_shard,
            workers=workers,
            drop_duplicates=drop_duplicates,
            report=report,
        ),
        out,
    )
    shard_images.print_duplicates(out)


def _write(write: "Callable[[Report], Written]", out: Path) -> None:
    started = time.monotonic()
    with _progress("writing") as report:
        written = write(report)
    if written.complete_before:
        print(f"{out} is complete already: {_contents(written.manifest)}")
        return
    if written.resumed:
        print(f"stood already: {_count(written.resumed, 'shard')}")
    if written.left_out:
        print(f"warning: left out {_count(written.left_out, 'bad picture')}", file=sys.stderr)
    if written.duplicates:
        print(f"kept out of training: {_count(written.duplicates, 'duplicate')} of other splits")
    print(f"{out}: {_contents(written.manifest)}, {_seconds(started)}")


def _contents(manifest: Manifest) -> str:
    splits = " + ".join(
        f"{sum(shard.samples for shard in manifest.of_split(split)):,} {split}"
        for split in manifest.splits
    )
    size = sum(shard.bytes for shard in manifest.shards) / 1e6
    return (
        f"{splits} samples, {len(manifest.classes):,} classes, "
        f"{_count(len(manifest.shards), 'shard')}, {size:,.1f} MB"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def _seconds(started: float) -> str:
    return f"{time.monotonic() - started:.1f} s"


@contextmanager
def _progress(verb: str, unit: str = "samples") -> "Iterator[Report]":
    """A bar with rate and time left on a terminal; a plain line now and then elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines(verb, unit)
        return
    columns = (
        TextColumn(verb),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(verb, total=None, rate="")
        rate = _Rate()
        yield lambda done, total: bar.update(
            task, completed=done, total=total, rate=f"{rate.of(done):,.0f} {unit}/s"
        )


def _plain_lines(verb: str, unit: str = "samples") -> "Report":
    rate = _Rate()
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        speed = rate.of(done)
        if speed == 0 or time.monotonic() - last < _SECONDS_BETWEEN_LINES:
            return
        last = time.monotonic()
        left = (total - done) / speed
        print(
            f"{verb} {done:,} of {total:,} {unit}, {speed:,.0f} {unit}/s, {left:,.0f} s left",
            file=sys.stderr,
            flush=True,
        )

    return report


class _Rate:
    """Samples a second since the first report, which a resumed run makes far from zero."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def of(self, done: int) -> float:
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done)
        seconds = now - self._first[0]
        return (done - self._first[1]) / seconds if seconds > 0 else 0.0
