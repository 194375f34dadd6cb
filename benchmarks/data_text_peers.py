"""Code that users without kway would write to turn tars of texts into batches of token IDs.

This module does not import kway. All pipelines encode with the tokenizers library in one thread,
truncate, and pad a batch to its longest text, rounded up to a multiple of 8. A batch consists of
token IDs, an attention mask and labels, int64 each.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import webdataset
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.data_tar_samples import TarSamples

_MULTIPLE = 8
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


class Encoder:
    """A tokenizer of the tokenizers library, opened from a folder."""

    def __init__(self, folder: Path, max_length: int, pad_token: str = "[PAD]") -> None:
        self._backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._backend.enable_truncation(max_length)
        self._backend.no_padding()
        self._pad_id = self._backend.token_to_id(pad_token)
        self._max_length = max_length

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token IDs of each text, with special tokens."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]

    def batch(self, samples: Iterable[tuple[str, int]]) -> Arrays:
        """Encode and pad (text, label) pairs."""
        texts, labels = zip(*samples, strict=True)
        ids = self.ids(texts)
        lengths = np.array([len(row) for row in ids])
        width = min(-(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE, self._max_length)
        padded = np.full((len(ids), width), self._pad_id, np.int64)
        for into, row in zip(padded, ids, strict=True):
            into[: len(row)] = row
        mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
        return padded, mask, np.array(labels)


def tar_texts(tars: Sequence[str]) -> TarSamples[str]:
    """Return random access to the texts of `tars`."""
    return TarSamples(tars, bytes.decode, "txt")


def hand_written_batches(tars: Sequence[str], encoder: Encoder, batch: int) -> Iterator[Arrays]:
    """Yield infinite batches in random order."""
    texts = tar_texts(tars)
    for indices in texts.random_indices(batch):
        yield encoder.batch([texts[index] for index in indices])


def webdataset_batches(tars: Sequence[str], encoder: Encoder, batch: int) -> Iterator[Arrays]:
    """Return infinite batches in the order of the tars."""
    dataset = (
        webdataset.WebDataset(list(tars), shardshuffle=False)
        .to_tuple("txt", "cls")
        .map_tuple(bytes.decode, int)
        .batched(batch, collation_fn=encoder.batch, partial=False)
        .repeat()
    )
    return iter(dataset)


def grain_batches(tars: Sequence[str], encoder: Encoder, batch: int) -> Iterator[Arrays]:
    """Return infinite batches in random order."""
    import grain  # takes a second

    dataset = grain.MapDataset.source(tar_texts(tars)).seed(0).shuffle().repeat()
    # Its threads would not reduce the CPU time.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(dataset.batch(batch, batch_fn=encoder.batch).to_iter_dataset(options))


def arrow_batches(tars: Sequence[str], encoder: Encoder, batch: int) -> Iterator[Arrays] | None:
    """Return infinite batches of a torch DataLoader over a Hugging Face dataset in Arrow format, in
    random order, or None without the datasets library.
    """
    try:
        import datasets
    except ImportError:
        return None
    texts, labels = zip(*tar_texts(tars), strict=True)
    table = datasets.Dataset.from_dict({"text": texts, "label": labels})

    def encoded(rows: Sequence[dict[str, Any]]) -> Arrays:
        return encoder.batch((row["text"], row["label"]) for row in rows)

    sampler = RandomSampler(table, num_samples=10**9)  # no pause between epochs
    return iter(DataLoader(table, batch, sampler=sampler, collate_fn=encoded))
