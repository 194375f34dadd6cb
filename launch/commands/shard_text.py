"""`kway shard tweets`, `table` and `emoji-names`: texts to shards.

What they share with the other sources is `shard_writing.py`.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from launch.commands.given import given_options, refuse
from launch.commands.shard_classes import Vectors, with_label_vectors
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

if TYPE_CHECKING:
    from data.sources.labelled_texts import LabelledTexts
    from data.sources.table import Table
    from data.sources.tweets import Tweets

Keep = Annotated[
    bool, typer.Option("--keep-duplicates", help="keep equal texts of one class and split")
]
DropAcross = Annotated[
    bool, typer.Option("--drop-across", help="keep out of training what another split holds, too")
]
TestFraction = Annotated[
    float, typer.Option(min=0, max=1, help="of texts held out, by a hash of the text")
]
What = Literal["replace", "remove", "keep"]


_RAW_TWEETS = (
    *("--text", "--language", "--id", "--languages", "--policy", "--emoji", "--users", "--urls"),
    *("--keep-retweets", "--min-count", "--top", "--test-fraction"),
)
_LABELLED_FOLDER = ("--keep-texts", "--drop-across")
_PICTURES = ("--root", "--short-side", "--quality", "--original", "--skip-bad")


def tweets(
    context: typer.Context,
    files: Annotated[
        list[Path],
        typer.Argument(
            help="raw tweets: .jsonl, .csv, .tsv, or .txt of one a line; or one folder of "
            "train_text.txt, train_labels.txt, mapping.txt as tweeteval has it"
        ),
    ],
    out: Out,
    text: Annotated[
        str | None, typer.Option(help="column or field of the text; dots lead into nested fields")
    ] = None,
    language: Annotated[str | None, typer.Option(help="column or field of the language")] = None,
    identity: Annotated[str | None, typer.Option("--id", help="column or field of the id")] = None,
    languages: Annotated[
        str | None, typer.Option(help="only these, with commas between; default: all")
    ] = None,
    policy: Annotated[
        Literal["first", "each", "only-if-single", "most-frequent"],
        typer.Option(help="which of several emoji in a tweet is its label"),
    ] = "first",
    emoji: Annotated[
        Literal["fold", "keep"],
        typer.Option(help="skin tone and variation selector of a label: off, or as they are"),
    ] = "fold",
    users: Annotated[What, typer.Option(help="user names: @user, nothing, or as they are")] = (
        "replace"
    ),
    urls: Annotated[What, typer.Option(help="addresses: http, nothing, or as they are")] = (
        "replace"
    ),
    keep_retweets: Annotated[bool, typer.Option("--keep-retweets")] = False,
    keep_duplicates: Keep = False,
    drop_across: DropAcross = False,
    keep_texts: Annotated[
        bool, typer.Option("--keep-texts", help="of a labelled folder: every text as it is")
    ] = False,
    min_count: Annotated[int, typer.Option(min=1, help="texts that a class needs")] = 1,
    top: Annotated[int | None, typer.Option(min=2, help="only the N most frequent classes")] = None,
    test_fraction: TestFraction = 0.1,
    vectors: Vectors = None,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """Tweets whose emoji become labels, and are taken out of the texts with every part of one."""
    from data.sources.labelled_texts import LabelledTexts
    from data.sources.tweets import Tweets

    duplicates: Literal["drop", "keep"] = "keep" if keep_duplicates else "drop"
    across: Literal["drop", "keep"] = "drop" if drop_across else "keep"
    given = given_options(context)
    if len(files) == 1 and files[0].is_dir():
        refuse(given, _RAW_TWEETS, f"for raw tweets, and {files[0]} is a folder of labelled texts")
        labelled = LabelledTexts(
            files[0],
            _work(out),
            texts="keep" if keep_texts else "clean",
            duplicates=duplicates,
            across=across,
        )
        _write(labelled, out, vectors, samples_per_shard, workers)
        return
    refuse(given, _LABELLED_FOLDER, "for a folder of labelled texts, not for raw tweets")
    source = Tweets(
        tuple(files),
        _work(out),
        text=text,
        language=language,
        identity=identity,
        languages=_listed(languages),
        policy=policy,
        emoji_form=emoji,
        users=users,
        urls=urls,
        retweets="keep" if keep_retweets else "drop",
        duplicates=duplicates,
        min_count=min_count,
        top=top,
        test_fraction=test_fraction,
        workers=workers,
    )
    _write(source, out, vectors, samples_per_shard, workers)


def table(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(help=".csv, .tsv, .jsonl or .parquet")],
    out: Out,
    label: Annotated[str, typer.Option(help="column of the label")],
    text: Annotated[str | None, typer.Option(help="column of the text")] = None,
    picture: Annotated[str | None, typer.Option(help="column of a picture's path")] = None,
    split: Annotated[
        str | None, typer.Option(help="column of the split; default: by --test-fraction")
    ] = None,
    root: Annotated[
        Path | None, typer.Option(help="where the pictures are; default: beside the first file")
    ] = None,
    test_fraction: TestFraction = 0.1,
    drop_duplicates: Annotated[
        bool, typer.Option("--drop-duplicates", help="equal texts of one class and split")
    ] = False,
    drop_across: DropAcross = False,
    min_count: Annotated[int, typer.Option(min=1, help="rows that a class needs")] = 1,
    short_side: ShortSide = 256,
    quality: Quality = 90,
    original: Original = False,
    skip_bad: SkipBad = False,
    vectors: Vectors = None,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """A table with a column for texts, or paths of pictures, and one for labels."""
    from data.sources.table import Table

    given = given_options(context)
    if picture is None:
        refuse(given, _PICTURES, "for a table of pictures, which --picture names")
    if split is not None:
        refuse(given, ("--test-fraction",), "where no --split says what is held out")
    source = Table(
        tuple(files),
        _work(out),
        label,
        text=text,
        picture=picture,
        split=split,
        root=root,
        test_fraction=test_fraction,
        duplicates="drop" if drop_duplicates else "keep",
        across="drop" if drop_across else "keep",
        min_count=min_count,
        short_side=None if original else short_side,
        quality=quality,
        skip_bad=skip_bad,
        workers=workers,
    )
    _write(source, out, vectors, samples_per_shard, workers)


def emoji_names(
    out: Out,
    classes: Annotated[
        int | None, typer.Option(min=2, help="only the first N by code points; default: all")
    ] = None,
    languages: Annotated[
        str | None, typer.Option(help="with commas between; default: all that have names")
    ] = None,
    test_languages: Annotated[str, typer.Option(help="held out for the test split")] = "it,fa",
    no_tones: Annotated[
        bool, typer.Option("--no-tones", help="without the names of emoji with a skin tone")
    ] = False,
    vectors: Vectors = None,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """Names of emoji in 14 languages; needs no download."""
    from data.sources.emoji_names import EmojiNames

    source = EmojiNames(classes, _listed(languages), _listed(test_languages), tones=not no_tones)
    described = with_label_vectors(source, vectors)
    write(source, out, samples_per_shard=samples_per_shard, workers=workers, vectors=described)


def _write(
    source: "Tweets | LabelledTexts | Table",
    out: Path,
    vectors: Path | None,
    samples_per_shard: int,
    workers: int | None,
) -> None:
    with progress("reading", "bytes") as report:
        source = replace(source, report=report)
        try:
            write(
                source,
                out,
                samples_per_shard=samples_per_shard,
                workers=workers,
                vectors=with_label_vectors(source, vectors),
                notes=source.notes,
            )
        except ValueError:
            # The input has to change, so nothing of it would be gone on with.
            source.clean_up()
            raise
        source.clean_up()


def _work(out: Path) -> Path:
    return out.with_name(f"{out.name}.first-pass")


def _listed(names: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (names or "").split(",") if name.strip())
