"""`kway shard imagefolder`, `imagenet`, `cifar100`, `cifar10`, `mnist`: pictures to shards.

What they share with the other sources is `shard_writing.py`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.commands.shard_classes import (
    Vectors,
    WordNetFolder,
    read_taxonomy,
    with_label_vectors,
)
from launch.commands.shard_writing import (
    Original,
    Out,
    PerShard,
    Quality,
    ShortSide,
    SkipBad,
    Workers,
    write,
)
from launch.progress import progress
from launch.wording import printable

if TYPE_CHECKING:
    from data.skipped import Skipped
    from data.sources import Source

DropDuplicates = Annotated[
    bool,
    typer.Option(
        "--drop-duplicates", help="keep out of training what another split holds, byte for byte"
    ),
]
Archive = Annotated[Path, typer.Argument(help="the binary version: its tar.gz, or a folder of it")]


def imagefolder(
    folder: Annotated[
        Path, typer.Argument(help="class folders of pictures, or train/ and test/ of those")
    ],
    out: Out,
    labels: Annotated[
        Path | None, typer.Option(help="lines `file,class` instead of class folders")
    ] = None,
    nested: Annotated[
        bool | None,
        typer.Option(
            "--nested/--topmost",
            help="for nested class folders: the class is the folder that contains the image, with "
            "the folders above as its hierarchy, or the topmost folder",
        ),
    ] = None,
    wordnet: WordNetFolder = None,
    short_side: ShortSide = 256,
    quality: Quality = 90,
    original: Original = False,
    test_fraction: Annotated[
        float, typer.Option(min=0, max=1, help="of pictures held out, where there is no test/")
    ] = 0.1,
    skip_bad: SkipBad = False,
    drop_duplicates: DropDuplicates = False,
    vectors: Vectors = None,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """A folder of pictures of your own."""
    from data.sources import ImageFolder

    source = ImageFolder(
        folder,
        labels=labels,
        nested=nested,
        taxonomy=read_taxonomy(wordnet),
        short_side=None if original else short_side,
        quality=quality,
        test_fraction=test_fraction,
        skip_bad=skip_bad,
    )
    _note(folder, source.notes())
    ignored = source.skipped()
    _write(source, out, drop_duplicates, vectors, samples_per_shard, workers, ignored)


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
    wordnet: WordNetFolder = None,
    short_side: ShortSide = 256,
    quality: Quality = 90,
    original: Original = False,
    skip_bad: SkipBad = False,
    drop_duplicates: DropDuplicates = False,
    vectors: Vectors = None,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """ImageNet: the tar files of ILSVRC 2012 without unpacking them, or the extracted folders."""
    from data.sources import ImageNet

    taxonomy = read_taxonomy(wordnet)
    with progress("listing", "classes") as report:
        source = ImageNet(
            folder,
            devkit,
            taxonomy=taxonomy,
            short_side=None if original else short_side,
            quality=quality,
            skip_bad=skip_bad,
            report=report,
        )
        notes, ignored = source.notes(), source.skipped()
    _note(folder, notes)
    _write(source, out, drop_duplicates, vectors, samples_per_shard, workers, ignored)


def cifar100(
    archive: Archive,
    out: Out,
    drop_duplicates: DropDuplicates = False,
    vectors: Vectors = None,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """CIFAR-100: cifar-100-binary.tar.gz as published, with its coarse classes."""
    from data.sources import Cifar100

    source = Cifar100(archive)
    _note(archive, source.notes())
    _write(source, out, drop_duplicates, vectors, samples_per_shard, workers)


def cifar10(
    archive: Archive,
    out: Out,
    drop_duplicates: DropDuplicates = False,
    vectors: Vectors = None,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """CIFAR-10: cifar-10-binary.tar.gz as published."""
    from data.sources import Cifar10

    source = Cifar10(archive)
    _note(archive, source.notes())
    _write(source, out, drop_duplicates, vectors, samples_per_shard, workers)


def mnist(
    folder: Annotated[Path, typer.Argument(help="with train-images-idx3-ubyte.gz and the others")],
    out: Out,
    names: Annotated[
        Path | None, typer.Option(help="class names, one a line; default: 0, 1, 2, …")
    ] = None,
    drop_duplicates: DropDuplicates = False,
    vectors: Vectors = None,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """MNIST, Fashion-MNIST and others in the same four idx files."""
    from data.sources import Mnist

    _write(Mnist(folder, names), out, drop_duplicates, vectors, samples_per_shard, workers)


def _note(origin: Path, notes: list[str]) -> None:
    for note in notes:
        print(printable(f"note: {origin}: {note}"), file=sys.stderr)


def _write(
    source: "Source",
    out: Path,
    drop_duplicates: bool,
    vectors: Path | None,
    samples_per_shard: int,
    workers: int | None,
    ignored: Sequence["Skipped"] = (),
) -> None:
    described = with_label_vectors(source, vectors)
    if described is not None:
        described.label_vectors()  # what is wrong is said now, not after the last shard
    write(
        source,
        out,
        samples_per_shard=samples_per_shard,
        workers=workers,
        drop_duplicates=drop_duplicates,
        vectors=described,
        ignored=ignored,
    )
    _print_duplicates(out)


def _print_duplicates(out: Path) -> None:
    """One line for each split of finished shards that repeats itself or what training holds."""
    from data.writing.duplicates import find_duplicates

    found = find_duplicates(out)
    for split in found:
        if split.in_training or split.repeated:
            print(printable(f"duplicates: {split}"))
    if any(split.in_training for split in found):
        print("--drop-duplicates, into another folder, keeps what is in test out of training")
