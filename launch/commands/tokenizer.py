"""`kway tokenizer`: trains a WordPiece tokenizer on text shards."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from data.messages import pluralize, printable
from data.skipped import NAMED
from launch.output_path import explain_write_errors
from launch.terminal import progress, seconds_since


def tokenizer(
    shards: Annotated[
        str, typer.Argument(metavar="SHARDS", help="folder of text shards, or its URL")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder of the tokenizer")],
    vocab_size: Annotated[
        int, typer.Option(min=10, help="number of tokens, including special tokens")
    ] = 30_000,
    split: Annotated[str, typer.Option(help="split to train on")] = "train",
    max_texts: Annotated[
        int,
        typer.Option(min=1, help="maximum number of texts; if there are more, a sample is used"),
    ] = 2_000_000,
    lowercase: Annotated[
        bool, typer.Option("--lowercase", help="convert texts to lower case")
    ] = False,
) -> None:
    """Train a tokenizer on text shards, for use as a recipe's data.text.tokenizer."""
    from data.text.tokenizer_training import train_tokenizer

    started = time.monotonic()
    with progress("reading", "texts") as report, explain_write_errors(out, "--out"):
        trained = train_tokenizer(
            shards,
            out,
            split=split,
            vocab_size=vocab_size,
            max_texts=max_texts,
            lowercase=lowercase,
            report=report,
        )
    for line in trained.problems[:NAMED]:
        print(printable(f"skipped: {line}"), file=sys.stderr)
    if trained.problems:
        print(f"warning: skipped {pluralize(len(trained.problems), 'bad text')}", file=sys.stderr)
    print(
        f"{out}: {trained.vocab_size:,} tokens from {pluralize(trained.texts, 'text')}; "
        f"on {pluralize(trained.held_out, 'held-out text')}: {trained.tokens_per_text:.1f} tokens "
        f"per text, {trained.unknown:.3%} unknown; {seconds_since(started)}"
    )
