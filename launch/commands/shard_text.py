"""`kway shard tweets`, `table`, `emoji-names`, and `check`: texts to shards, and their leaks.

What they share with the other sources (writing, progress, verifying) is `shard.py`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table as Lines

if TYPE_CHECKING:
    from data.leaks import LeakReport
    from data.sources.labelled_texts import LabelledTexts
    from data.sources.table import Table
    from data.sources.tweets import Tweets
    from data.text.spans import Report
    from data.writer import Written

Out = Annotated[Path, typer.Option("--out", "-o", help="folder that the shards go to")]
Workers = Annotated[int | None, typer.Option(min=0, help="processes; default: one a core")]
PerShard = Annotated[int, typer.Option(min=1, help="samples a shard")]
Keep = Annotated[
    bool, typer.Option("--keep-duplicates", help="keep equal texts of one class and split")
]
DropAcross = Annotated[
    bool, typer.Option("--drop-across", help="keep out of training what another split holds, too")
]
TestFraction = Annotated[
    float, typer.Option(min=0, max=1, help="of texts held out, by a hash of the text")
]
Vectors = Annotated[
    Path | None,
    typer.Option(help="of the emoji, word2vec binary such as emoji2vec.bin; default: from names"),
]
What = Literal["replace", "remove", "keep"]


def tweets(
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
    if len(files) == 1 and files[0].is_dir():
        labelled = LabelledTexts(
            files[0],
            _work(out),
            texts="keep" if keep_texts else "clean",
            duplicates=duplicates,
            across=across,
            vectors=vectors,
            report=_reading(),
        )
        _write(labelled, out, samples_per_shard, workers)
        return
    if keep_texts or drop_across:
        raise ValueError("--keep-texts and --drop-across are for a folder of labelled texts")
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
        vectors=vectors,
        workers=workers,
        report=_reading(),
    )
    _write(source, out, samples_per_shard, workers)


def table(
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
    short_side: Annotated[int, typer.Option(min=1, help="larger pictures shrink to it")] = 256,
    quality: Annotated[int, typer.Option(min=1, max=100, help="of JPEG, for those")] = 90,
    original: Annotated[bool, typer.Option("--original", help="keep bytes as they are")] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="leave out and count what is no picture")
    ] = False,
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """A table with a column for texts, or paths of pictures, and one for labels."""
    from data.sources.table import Table

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
        report=_reading(),
    )
    _write(source, out, samples_per_shard, workers)


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
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """Names of emoji in 14 languages; needs no download."""
    from data.sources.emoji_names import EmojiNames
    from data.writer import write_shards
    from launch.commands import shard

    source = EmojiNames(classes, _listed(languages), _listed(test_languages), tones=not no_tones)
    shard._write(
        lambda report: write_shards(
            source, out, samples_per_shard=samples_per_shard, workers=workers, report=report
        ),
        out,
    )


def check(
    shards: Annotated[Path, typer.Argument(help="folder of shards of texts")],
    split: Annotated[str, typer.Option(help="that is looked at")] = "train",
    texts: Annotated[int, typer.Option(min=40, help="at most; half of them to learn from")] = (
        100_000
    ),
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="fall of accuracy that makes a suspect")
    ] = 0.02,
    rows: Annotated[int, typer.Option(min=0, help="characters shown that are no suspects")] = 10,
    strict: Annotated[
        bool, typer.Option("--strict", help="exit code 2 where there is a suspect")
    ] = False,
) -> None:
    """Find single characters that give the label of texts away, such as what is left of emoji."""
    from data.leaks import check_leaks

    report = check_leaks(shards, split=split, limit=texts, threshold=threshold)
    _print_leaks(report, rows)
    found = ", ".join(leak.name for leak in report.suspects)
    if not found:
        print(f"{shards}: no character gives the label away")
        return
    print(f"{shards}: suspect: {found}")
    if strict:
        print(
            f"error: {shards}: {found}: make the shards again without it",
            file=sys.stderr,
        )
        raise typer.Exit(2)


def _print_leaks(report: "LeakReport", rows: int) -> None:
    print(
        f"{report.texts:,} texts: accuracy {report.accuracy:.3f} from single characters, "
        f"{report.most_frequent:.3f} from the most frequent class alone"
    )
    lines = Lines("character", "texts", "class", "precision", "lift", "bits", "fall", "suspect")
    for leak in report.leaks[: len(report.suspects) + rows]:
        lines.add_row(
            leak.name,
            f"{leak.texts:,}",
            leak.class_name,
            f"{leak.precision:.2f}",
            f"{leak.lift:.1f}",
            f"{leak.information:.3f}",
            f"{leak.fall:+.3f}",
            leak.suspect or "",
        )
    console = Console()
    # Off a terminal rich takes 80 columns, which breaks every line of the table.
    Console(width=console.width if console.is_terminal else 160).print(lines)


def _write(
    source: "Tweets | LabelledTexts | Table",
    out: Path,
    samples_per_shard: int,
    workers: int | None,
) -> None:
    from data.writer import write_shards
    from launch.commands import shard

    def write(report: "Report") -> "Written":
        written = write_shards(
            source, out, samples_per_shard=samples_per_shard, workers=workers, report=report
        )
        if not written.complete_before:
            for note in source.notes():
                print(f"note: {note}", file=sys.stderr)
        return written

    try:
        shard._write(write, out)
    except ValueError:
        # The input has to change, so nothing of it would be gone on with.
        source.clean_up()
        raise
    source.clean_up()


def _reading() -> "Report":
    from launch.commands.shard import _plain_lines

    return _plain_lines("reading", "bytes")


def _work(out: Path) -> Path:
    return out.with_name(f"{out.name}.first-pass")


def _listed(names: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (names or "").split(",") if name.strip())
