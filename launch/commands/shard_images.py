"""`kway shard imagenet`, `cifar100`, `cifar10`, `mnist`: published sets of pictures as they come.

What they share with the other sources (writing, progress, verifying) is `shard.py`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from data.sources import Source

Out = Annotated[Path, typer.Option("--out", "-o", help="folder that the shards go to")]
Workers = Annotated[int | None, typer.Option(min=0, help="processes; default: one a core")]
PerShard = Annotated[int, typer.Option(min=1, help="samples a shard")]
ShortSide = Annotated[int, typer.Option(min=1, help="larger pictures shrink to it")]
Quality = Annotated[int, typer.Option(min=1, max=100, help="of JPEG, for those")]
Original = Annotated[bool, typer.Option("--original", help="keep bytes as they are")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="leave out and count what is no picture")]
DropDuplicates = Annotated[
    bool,
    typer.Option(
        "--drop-duplicates", help="keep out of training what another split holds, byte for byte"
    ),
]
Archive = Annotated[Path, typer.Argument(help="the binary version: its tar.gz, or a folder of it")]


def imagenet(
    folder: Annotated[
        Path,
        typer.Argument(help="with ILSVRC2012_img_train.tar or train/, and the same of val"),
    ],
    out: Out,
    devkit: Annotated[
        Path | None,
        typer.Option(help="ILSVRC2012_devkit_t12.tar.gz or its folder; default: in FOLDER"),
    ] = None,
    short_side: ShortSide = 256,
    quality: Quality = 90,
    original: Original = False,
    skip_bad: SkipBad = False,
    drop_duplicates: DropDuplicates = False,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """ImageNet: the tar files of ILSVRC 2012 without unpacking them, or the extracted folders."""
    from data.sources import ImageNet

    source = ImageNet(
        folder,
        devkit,
        short_side=None if original else short_side,
        quality=quality,
        skip_bad=skip_bad,
    )
    print(f"listing the pictures in {folder}", file=sys.stderr)
    _note(folder, source.notes())
    _write(source, out, drop_duplicates, samples_per_shard, workers)


def cifar100(
    archive: Archive,
    out: Out,
    drop_duplicates: DropDuplicates = False,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """CIFAR-100: cifar-100-binary.tar.gz as published, with its coarse classes."""
    from data.sources import Cifar100

    source = Cifar100(archive)
    _note(archive, source.notes())
    _write(source, out, drop_duplicates, samples_per_shard, workers)


def cifar10(
    archive: Archive,
    out: Out,
    drop_duplicates: DropDuplicates = False,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """CIFAR-10: cifar-10-binary.tar.gz as published."""
    from data.sources import Cifar10

    source = Cifar10(archive)
    _note(archive, source.notes())
    _write(source, out, drop_duplicates, samples_per_shard, workers)


def mnist(
    folder: Annotated[Path, typer.Argument(help="with train-images-idx3-ubyte.gz and the others")],
    out: Out,
    names: Annotated[
        Path | None, typer.Option(help="class names, one a line; default: 0, 1, 2, …")
    ] = None,
    drop_duplicates: DropDuplicates = False,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """MNIST, Fashion-MNIST and others in the same four idx files."""
    from data.sources import Mnist

    _write(Mnist(folder, names), out, drop_duplicates, samples_per_shard, workers)


def _note(origin: Path, notes: list[str]) -> None:
    for note in notes:
        print(f"note: {origin}: {note}", file=sys.stderr)


def _write(
    source: "Source", out: Path, drop_duplicates: bool, samples_per_shard: int, workers: int | None
) -> None:
    from data.writer import write_shards
    from launch.commands import shard

    shard._write(
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
    print_duplicates(out)


def print_duplicates(out: Path) -> None:
    """One line for each split of finished shards that repeats itself or what training holds."""
    from data.duplicates import find_duplicates

    found = find_duplicates(out)
    for split in found:
        if split.in_training or split.repeated:
            print(f"duplicates: {split}")
    if any(split.in_training for split in found):
        print("--drop-duplicates, into another folder, keeps what is in test out of training")
