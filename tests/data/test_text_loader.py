"""Batches contain texts of similar length, skip no text, and are the same on every topology."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.augment.training import AugmentConfig
from data.config import DataConfig, TextConfig
from data.loading.batch import Cursor
from data.loading.inputs import pad_tokens
from data.loading.loader import EvalLoader, TrainLoader
from data.loading.order import ByLength, Order
from data.loading.sampling import samples_per_epoch
from data.shards.split import open_split
from data.text.tokenizer import open_tokenizer
from tests.data.rank_batches import opened, rank_batches

BATCH = 7


def config(texts: Path, *, workers: int = 0, batches_by_length: int = 4) -> DataConfig:
    text = TextConfig(
        tokenizer=str(texts / "tokenizer"), max_length=24, batches_by_length=batches_by_length
    )
    return DataConfig(shards=texts / "shards", text=text, workers=workers)


def stream(
    texts: Path, *, world_size: int = 1, batch: int = BATCH, steps: int, cursor: Cursor, **settings
) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Return, for each step, the (index, unpadded tokens) of the samples of all ranks, in order."""
    batches: list[list[tuple[int, tuple[int, ...]]]] = []
    shape = {"batch": batch, "steps": steps, "world_size": world_size}
    for ranks in rank_batches(config(texts, **settings), cursor, **shape):
        batches.append([])
        for found in ranks:
            ids, mask = found.inputs["input_ids"], found.inputs["attention_mask"]
            assert ids.dtype == mask.dtype == torch.int64
            assert ids.shape == mask.shape
            assert ids.shape[1] % 8 == 0
            for index, row, row_mask in zip(found.indices, ids, mask, strict=True):
                assert (row[row_mask == 0] == 0).all()
                batches[-1].append((int(index), tuple(row[row_mask == 1].tolist())))
    return batches


def test_batches_contain_the_tokens_of_the_tokenizer(texts: Path) -> None:
    tokenizer = open_tokenizer(str(texts / "tokenizer"), max_length=24)
    with open_split(texts / "shards", "train") as split:
        for batch in stream(texts, steps=12, cursor=Cursor(1)):
            for index, tokens in batch:
                assert list(tokens) == tokenizer.encode([split.text(index)[0]])[0]
                assert len(tokens) <= 24


def test_a_run_resumed_inside_a_window_on_more_ranks_reads_the_rest_of_the_window(
    texts: Path,
) -> None:
    whole = stream(texts, steps=13, cursor=Cursor(5))
    for stopped in (1, 3, 6):
        rest = stream(
            texts, world_size=2, steps=13 - stopped, cursor=Cursor(5, samples=stopped * BATCH)
        )
        assert whole[stopped:] == rest


def test_a_batch_has_texts_of_similar_length_and_an_epoch_has_every_text(texts: Path) -> None:
    with open_split(texts / "shards", "train") as split:
        num = len(split)
    steps = num // 8  # one window that is one epoch
    by_length, unsorted = (
        stream(texts, batch=8, steps=steps, cursor=Cursor(2), batches_by_length=window)
        for window in (steps, 1)
    )
    for batches in (by_length, unsorted):
        seen = sorted(index for batch in batches for index, _ in batch)
        assert seen == list(range(num))
    assert num_padding(by_length) < 0.5 * num_padding(unsorted)
    longest = [max(len(tokens) for _, tokens in batch) for batch in by_length]
    assert longest != sorted(longest), "the batches of a window are shuffled"


def num_padding(batches: list[list[tuple[int, tuple[int, ...]]]]) -> int:
    lengths = [[len(tokens) for _, tokens in batch] for batch in batches]
    return sum(max(batch) * len(batch) - sum(batch) for batch in lengths)


@settings(max_examples=60)
@given(
    num=st.integers(1, 120),
    batch=st.integers(1, 40),
    num_batches=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_epoch_is_a_permutation_of_the_same_epoch_unsorted(
    num: int, batch: int, num_batches: int, seed: int
) -> None:
    below = Order(seed, [num]).locate
    by_length = ByLength(
        below,
        lambda samples: samples % 7,
        seed=seed,
        epoch=num,
        batch=batch,
        num_batches=num_batches,
    )
    for epoch in (0, 1, 5):
        positions = np.arange(epoch * num, (epoch + 1) * num)
        ours = list(zip(*by_length.locate(positions), strict=True))
        assert sorted(ours) == sorted(zip(*below(positions), strict=True))
        for position in positions[[0, num // 2, num - 1]].tolist():
            (found,) = zip(*by_length.locate(np.array([position])), strict=True)
            assert found == ours[position - epoch * num]


@pytest.mark.parametrize("kind", ["sampling", "mixture"])
def test_sorting_by_length_does_not_change_which_samples_an_epoch_draws(
    kind: str, texts: Path
) -> None:
    sets = [
        {"shards": texts / "shards", "split": split, "weight": weight}
        for split, weight in (("train", 2), ("test", 1))
    ]
    draws = {
        "sampling": {"sampling": {"power": 0.0, "epoch_samples": 50}},
        "mixture": {"mixture": sets},
    }[kind]
    found = []
    for number in (1, 50):
        settings = {**config(texts, batches_by_length=number).model_dump(), **draws}
        recipe = DataConfig.model_validate(settings)
        with opened(recipe) as split:
            epoch = samples_per_epoch(split, recipe)
            loader = TrainLoader(split, recipe, global_batch=16, cursor=Cursor(4))
            batches = [next(loader) for _ in range(-(-3 * epoch // 16))]
        found.append([index for batch in batches for index in batch.indices.tolist()])
    plain, by_length = found
    for part in (slice(number * epoch, (number + 1) * epoch) for number in range(3)):
        assert sorted(plain[part]) == sorted(by_length[part])


def test_evaluation_reads_every_text_once_sorted_by_length(texts: Path) -> None:
    with open_split(texts / "shards", "test") as split:
        for world_size in (1, 3):
            seen, batches = [], set()
            for rank in range(world_size):
                loader = EvalLoader(split, config(texts), batch=4, rank=rank, world_size=world_size)
                found = list(loader)
                batches.add(len(found))
                assert np.all(np.diff(split.sizes(np.concatenate([b.indices for b in found]))) >= 0)
                for batch in found:
                    seen += batch.indices.tolist()
                    assert np.array_equal(batch.labels, split.labels[batch.indices.numpy()])
            assert sorted(seen) == list(range(len(split)))
            assert len(batches) == 1


def test_texts_are_padded_to_a_multiple_of_eight() -> None:
    padded = pad_tokens([[5, 6], [], list(range(1, 10))], pad_id=99, max_length=20)
    assert padded["input_ids"].shape == (3, 16)
    assert padded["input_ids"][0].tolist() == [5, 6] + 14 * [99]
    assert padded["attention_mask"].sum(1).tolist() == [2, 0, 9]
    # The model has only max_length positions.
    assert pad_tokens([[1] * 17], pad_id=0, max_length=20)["input_ids"].shape == (1, 20)


def test_texts_without_a_tokenizer_and_images_with_one_raise(texts: Path, glyphs: Path) -> None:
    flipped = config(texts).model_copy(update={"augment": AugmentConfig(flip=0)})
    for shards, recipe, message in (
        (texts / "shards", DataConfig(shards=texts), r"contains texts, but data\.text is missing"),
        (texts / "shards", flipped, r"data\.augment applies to images"),
        (glyphs, config(texts), r"contains images, but data\.text is set"),
    ):
        with open_split(shards, "train") as split, pytest.raises(ValueError, match=message):
            TrainLoader(split, recipe, global_batch=2, cursor=Cursor(0))


def test_a_window_is_no_longer_than_an_epoch_or_a_group_of_shards(texts: Path) -> None:
    """At most two groups are therefore read at a time, regardless of `batches_by_length`."""
    settings = config(texts, batches_by_length=1000)
    grouped = settings.model_copy(update={"shuffle_shards": 1})
    with open_split(texts / "shards", "train") as split:
        starts = np.cumsum([0, *(shard.samples for shard in split.manifest.of_split("train"))])
        loader = TrainLoader(split, grouped, global_batch=2, cursor=Cursor(1))
        order = split.order(1, 1)
        for step in range(len(split) // 2):
            indices = next(loader).indices.numpy()
            shards = set((np.searchsorted(starts, indices, side="right") - 1).tolist())
            near = {
                shard
                for position in (max(0, 2 * step - 12), 2 * step, 2 * step + 12)
                for shard in order.shards(order.group(position))
            }
            assert shards <= near
        assert order.samples_at_least == np.diff(starts).min() == 12
