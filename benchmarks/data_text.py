"""Text loading compared with the tokenizer alone, on the same texts in the same order.

By default, each text consists of three emoji names in various languages and is about as long as a
tweet. Other texts are read from shards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.timing import Row, rate_row, take_turns
from data.config import DataConfig, TextConfig
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.shards.manifest import ClassInfo, SourceInfo
from data.shards.split import Split, open_split
from data.shards.writer import write_shards
from data.sources import EmojiNames, Sample
from data.text.tokenizer import open_tokenizer
from data.text.tokenizer_training import train_tokenizer

BATCH, STEPS = 256, 40
MAX_LENGTH = 64
NUM_TEXTS = 20_000


@dataclass(frozen=True)
class ThreeNames:
    """A source of texts that consist of three emoji names each."""

    names: tuple[str, ...]
    modality = "text"

    def describe(self) -> SourceInfo:
        return SourceInfo(kind="three-names")

    def classes(self) -> tuple[ClassInfo, ...]:
        return (ClassInfo(name="all"),)

    def label_vectors(self) -> None:
        return None

    def splits(self) -> dict[str, Sequence[int]]:
        return {"train": range(NUM_TEXTS)}

    def render(self, task: int) -> Sample:
        three = np.random.default_rng(task).choice(len(self.names), 3)
        text = ", ".join(self.names[index] for index in three)
        return Sample(str(task), text.encode(), "txt", 0)


def rows(shards: Path | None) -> Iterator[Row]:
    """Time how long it takes to read, tokenize and pad texts."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if shards is None:
            write_shards(EmojiNames(), folder / "names")
            with open_split(folder / "names", "train") as split:
                names = tuple(split.text(index)[0] for index in range(len(split)))
            shards = folder / "texts"
            write_shards(ThreeNames(names), shards, workers=0)
        train_tokenizer(shards, folder / "tokenizer")
        with open_split(shards, "train") as split:
            yield _against_tokenizer(split, str(folder / "tokenizer"))


def _against_tokenizer(split: Split, tokenizer: str) -> Row:
    config = DataConfig(
        shards=str(split.folder), text=TextConfig(tokenizer=tokenizer, max_length=MAX_LENGTH)
    )
    bare = open_tokenizer(tokenizer, max_length=MAX_LENGTH)
    loader = TrainLoader(split, config, global_batch=BATCH, cursor=Cursor(0))
    batches = [next(loader) for _ in range(STEPS)]
    texts = [[split.text(index)[0] for index in batch.indices.tolist()] for batch in batches]
    num_tokens = sum(int(batch.inputs["attention_mask"].sum()) for batch in batches)

    def load() -> None:
        loader.close()
        loader.cursor = Cursor(0)
        for _ in range(STEPS):
            next(loader)

    def tokenize() -> None:
        for batch in texts:
            bare.encode(batch)

    times = take_turns({"loader": load, "bare": tokenize}, title="text", seconds=60)
    return rate_row(
        "texts: loader / bare tokenizer",
        f"batches of {BATCH}, WordPiece, {num_tokens / (BATCH * STEPS):.0f} tokens per text",
        times["loader"],
        times["bare"],
        at_least=0.8,
        count=BATCH * STEPS,
        unit="texts/s",
    )
