"""Random schedules: whatever kills a run and however it resumes, it reads the samples of one rank
without loader processes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.config import DataConfig
from data.loading.batch import Cursor
from tests.data.rank_batches import opened, rank_batches, row_labels

SCHEDULES = 120
KINDS = ("images", "texts", "shuffled", "sampled", "mixture", "sets", "sampled sets")


def drawn(kind: str, folders: dict[str, Path], rng: np.random.Generator) -> dict[str, Any]:
    """Return the settings of a run on one of the kinds of data."""
    settings: dict[str, Any] = {"image": {"size": 12, "resize": 14}, "shards": folders["images"]}
    if kind == "texts":
        lengths = int(rng.integers(1, 7))
        text = {"tokenizer": str(folders["texts"] / "tokenizer"), "batches_by_length": lengths}
        settings = {"shards": folders["texts"] / "shards", "text": text}
    if kind == "shuffled" or (kind == "texts" and rng.random() < 0.5):
        settings["shuffle_shards"] = int(rng.integers(1, 4))
    if "sets" in kind:
        settings["shards"] = folders["sets"]
        settings["augment"] = {"mix": {"mixup_alpha": 0.4}}
    if "sampled" in kind:
        settings["sampling"] = {"power": rng.random(), "epoch_samples": int(rng.integers(9, 99))}
    if kind == "mixture":
        sets = ((folders["images"], "train", 1.5), (folders["images"], "test", 1))
        settings["mixture"] = [
            dict(zip(("shards", "split", "weight"), s, strict=True)) for s in sets
        ]
    return settings


def ledger(config: DataConfig, cursor: Cursor, **shape: int) -> list[list[tuple[int, list[int]]]]:
    """Return the samples and labels of each global batch, those of rank 0 first."""
    return [
        [
            row
            for batch in ranks
            for row in zip(batch.indices.tolist(), row_labels(batch), strict=True)
        ]
        for ranks in rank_batches(config, cursor, **shape)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("number", range(SCHEDULES))
def test_a_random_schedule_reads_the_batches_of_one_rank(
    shards: Path, texts: Path, label_sets: Path, number: int
) -> None:
    rng, kind = np.random.default_rng(number), KINDS[number % len(KINDS)]
    settings = drawn(kind, {"images": shards, "texts": texts, "sets": label_sets}, rng)
    start, batch = Cursor(int(rng.integers(2**40))), int(rng.integers(1, 24))
    found: list[list[tuple[int, list[int]]]] = []
    for _ in range(int(rng.integers(2, 6))):  # each run is killed and resumed
        workers = int(rng.integers(1, 3)) if rng.random() < 0.1 else 0
        config = DataConfig(**settings, workers=workers)
        cursor = Cursor(start.seed, len(found) * batch)
        world_size, steps = int(rng.integers(1, 9)), int(rng.integers(1, 60 // batch + 3))
        found += ledger(config, cursor, batch=batch, steps=steps, world_size=world_size)
    config = DataConfig(**settings)
    assert found == ledger(config, start, batch=batch, steps=len(found))
    if not config.is_sampled:
        with opened(config) as split:
            size, order = len(split), [index for batch in found for index, _ in batch]
        for epoch in range(len(order) // size):
            assert sorted(order[epoch * size : (epoch + 1) * size]) == list(range(size))
