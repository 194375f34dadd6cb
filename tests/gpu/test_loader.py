"""Batches on a device match those on the CPU, with and without prefetching."""

from itertools import islice
from pathlib import Path

import torch

from data.augment.mix import Mix
from data.augment.training import AugmentConfig
from data.config import DataConfig
from data.images.config import ImageConfig
from data.loading.batch import Batch, Cursor
from data.loading.loader import TrainLoader
from data.shards.split import open_split


def config(shards: Path, workers: int) -> DataConfig:
    augment = AugmentConfig(mix=Mix(mixup_alpha=0.4))
    image = ImageConfig(size=16, channels=1, mean=(0.5,), std=(0.25,))
    return DataConfig(shards=shards, image=image, augment=augment, workers=workers)


def assert_same(ours: list[Batch], theirs: list[Batch], device: torch.device) -> None:
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert all(tensor.device.type == device.type for tensor in left.tensors())
        for mine, plain in zip(left.tensors(), right.tensors(), strict=True):
            assert torch.equal(mine.cpu(), plain)
        assert left.cursor == right.cursor


def test_training_batches_are_on_the_device_and_in_the_order_of_the_cursor(
    glyphs: Path, device: torch.device
) -> None:
    with open_split(glyphs, "train") as split:
        batches = []
        for target, workers in ((device, 1), (torch.device("cpu"), 0)):
            with TrainLoader(
                split, config(glyphs, workers), global_batch=7, cursor=Cursor(3), device=target
            ) as loader:
                batches.append(list(islice(loader, 9)))
                # Prefetched batches do not advance the cursor.
                assert loader.cursor == Cursor(3, samples=63)
    assert_same(*batches, device)
