"""Texts through the loader against the bare tokenizer on the same texts, in the same order."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.timing import Row, rate_row, take_turns
from data import Cursor, TrainLoader, open_split
from data.config import DataConfig, TextConfig
from data.sources import EmojiNames
from data.tokens.tokenizer import open_tokenizer
from data.tokens.train import train_tokenizer
from data.writing.writer import write_shards

BATCH, STEPS = 256, 40
MAX_LENGTH = 64


def rows() -> Iterator[Row]:
    """Names of emoji in twelve languages, read, tokenised and padded."""
    with TemporaryDirectory() as place:
        shards, tokenizer = Path(place) / "shards", Path(place) / "tokenizer"
        write_shards(EmojiNames(), shards)
        train_tokenizer(shards, tokenizer)
        text = TextConfig(tokenizer=str(tokenizer), max_length=MAX_LENGTH)
        bare = open_tokenizer(str(tokenizer), max_length=MAX_LENGTH)
        with open_split(shards, "train") as split:
            loader = TrainLoader(
                split, DataConfig(shards=shards, text=text), global_batch=BATCH, cursor=Cursor(0)
            )
            steps = [next(loader).indices.tolist() for _ in range(STEPS)]
            texts = [[split.text(index)[0] for index in batch] for batch in steps]

            def load() -> None:
                loader.close()
                loader.cursor = Cursor(0)
                for _ in range(STEPS):
                    next(loader)

            def tokenise() -> None:
                for batch in texts:
                    bare.encode(batch)

            times = take_turns({"loader": load, "bare": tokenise}, title="text", seconds=60)
    yield rate_row(
        "texts: loader / bare tokenizer",
        f"emoji names, batches of {BATCH}, WordPiece",
        times["loader"],
        times["bare"],
        at_least=0.8,
        count=BATCH * STEPS,
        unit="texts/s",
    )
