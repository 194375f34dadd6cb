"""Text loading compared with the tokenizer alone and with webdataset.

CPU seconds include all threads of the process; there are no loader processes. By default, the texts
are names of emoji, which are shorter than tweets.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.data_peers import Encoder, webdataset_loop
from benchmarks.timing import Row, rate_row, take_turns
from data.config import DataConfig, TextConfig
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.shards.split import Split, open_split
from data.shards.writing.writer import write_shards
from data.sources import EmojiNames
from data.text.tokenizer_training import train_tokenizer

BATCH, STEPS, MAX_LENGTH, CLASSES, SECONDS = 256, 40, 64, None, 90.0
BARE, WEBDATASET = "bare tokenizer, same texts in memory", "webdataset, same files"


def rows(shards: Path | None) -> Iterator[Row]:
    """Compare how long it takes to read, tokenize and pad texts."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if shards is None:
            shards = folder / "texts"
            write_shards(EmojiNames(CLASSES), shards)
        train_tokenizer(shards, folder / "tokenizer")
        with open_split(shards, "train") as split:
            yield from _compared(split, folder / "tokenizer")


def _compared(split: Split, tokenizer: Path) -> Iterator[Row]:
    config = DataConfig(
        shards=str(split.parts[0].folder),
        text=TextConfig(tokenizer=str(tokenizer), max_length=MAX_LENGTH),
    )
    tars = split.addresses
    encoder = Encoder(tokenizer, MAX_LENGTH)
    with TrainLoader(split, config, global_batch=BATCH, cursor=Cursor(0)) as loader:
        batches = [next(loader) for _ in range(STEPS)]
        num_tokens = sum(int(batch.inputs["attention_mask"].sum()) for batch in batches)
        texts = [[split.text(i)[0] for i in batch.indices.tolist()] for batch in batches]
        peer = webdataset_loop(tars, "txt", BATCH, encoder.collate)

        def load() -> None:
            loader.close()
            loader.cursor = Cursor(0)  # the texts of `texts`
            for _ in range(STEPS):
                next(loader)

        contenders: dict[str, Callable[[], object]] = {
            "loader": load,
            BARE: lambda: [encoder.ids(batch) for batch in texts],
            WEBDATASET: lambda: [next(peer) for _ in range(STEPS)],
        }
        times = take_turns(contenders, title="text", seconds=SECONDS, clock=time.process_time)
    case = f"batches of {BATCH}, WordPiece, {num_tokens / (BATCH * STEPS):.0f} tokens per text"
    for name, at_least in ((BARE, 0.95), (WEBDATASET, 1.0)):
        yield rate_row(
            f"texts: loader / {name}",
            case,
            times["loader"],
            times[name],
            at_least=at_least,
            count=BATCH * STEPS,
            unit="texts/CPU-s",
        )
