"""Text loading compared with the tokenizer alone, a hand-written loop and packaged loaders.

CPU seconds include all threads of the process; there are no loader processes.
By default, each text consists of three emoji names in various languages and is about as long as a
tweet. Other texts are read from shards.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from isal import isal_zlib

from benchmarks.data_text_peers import (
    Encoder,
    arrow_batches,
    grain_batches,
    hand_written_batches,
    webdataset_batches,
)
from benchmarks.timing import Row, rate_row, share_row, take_turns
from data.config import DataConfig, TextConfig
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.shards.manifest import ClassInfo, SourceInfo
from data.shards.split import Split, open_split
from data.shards.writing.writer import write_shards
from data.sources import EmojiNames, Sample
from data.text.tokenizer_training import train_tokenizer

BATCH, STEPS = 256, 40
MAX_LENGTH = 64
NUM_TEXTS = 20_000
BARE = "bare tokenizer, same texts in memory"
ARROW = "torch DataLoader + Hugging Face dataset in memory"
PEERS = {
    "hand-written loop, same files": hand_written_batches,
    "webdataset, same files": webdataset_batches,
    "grain, same files": grain_batches,
    ARROW: arrow_batches,
}
# The target for the ratio of the loader's rate to the peer's rate.
TARGETS = {BARE: 0.95} | dict.fromkeys(PEERS, 1.0)


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
    """Compare how long it takes to read, tokenize and pad texts."""
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
            yield from _compared(split, folder / "tokenizer")


def _compared(split: Split, tokenizer: Path) -> Iterator[Row]:
    config = DataConfig(
        shards=str(split.folder), text=TextConfig(tokenizer=str(tokenizer), max_length=MAX_LENGTH)
    )
    tars = [split.folder.address(shard) for shard in split.manifest.of_split("train")]
    encoder = Encoder(tokenizer, MAX_LENGTH)
    loader = TrainLoader(split, config, global_batch=BATCH, cursor=Cursor(0))
    batches = [next(loader) for _ in range(STEPS)]
    num_tokens = sum(int(batch.inputs["attention_mask"].sum()) for batch in batches)
    files = [[split.read(i)[0] for i in batch.indices.tolist()] for batch in batches]
    texts = [[data.decode() for data in batch] for batch in files]

    def load() -> None:
        loader.close()
        loader.cursor = Cursor(0)
        _take(loader)

    # The other contenders read the texts in another order.
    contenders: dict[str, Callable[[], object]] = {
        "loader": load,
        BARE: lambda: [encoder.ids(batch) for batch in texts],
        "checks": lambda: [isal_zlib.crc32(data) for batch in files for data in batch],
    }
    for name, peer in PEERS.items():
        if (found := peer(tars, encoder, BATCH)) is not None:
            contenders[name] = partial(_take, found)
    times = take_turns(contenders, title="text", seconds=90, clock=time.process_time)
    loader.close()
    case = f"batches of {BATCH}, WordPiece, {num_tokens / (BATCH * STEPS):.0f} tokens per text"
    for name, at_least in TARGETS.items():
        what = f"texts: loader / {name}"
        if name not in times:
            yield Row(what, case, details="not installed: pip install datasets")
            continue
        yield rate_row(
            what,
            case,
            times["loader"],
            times[name],
            at_least=at_least,
            count=BATCH * STEPS,
            unit="texts/CPU-s",
        )
    yield share_row(
        "texts: checks of the bytes",
        case,
        times["checks"],
        times["loader"],
        count=BATCH * STEPS,
        unit="text",
    )


def _take(batches: Iterator[object]) -> None:
    for _ in range(STEPS):
        next(batches)
