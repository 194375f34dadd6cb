"""Training images whose size changes during a run have the same pixels on every topology."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from data.augment.mix import Mix
from data.augment.training import AugmentConfig, ProgressiveSizes
from data.config import DataConfig
from data.images.config import ImageConfig
from data.loading.batch import Cursor
from data.loading.stream import Stream, StreamLoader
from data.shards.manifest import Manifest
from tests.data.rank_batches import rank_batches

BATCH = 7
IMAGE = ImageConfig(size=12, resize=14)
# The size first decreases, so that the memory of large images is reused for small ones, and then
# increases beyond the evaluation size. The first two stages end at the third and the fifth batch.
STAGES = (
    {"size": 8, "until": {"steps": 3}},
    {"size": 6, "until": {"samples": 5 * BATCH - 1}},
)
SIDES = [8, 8, 8, 6, 6, 16, 16, 16]
MIX = Mix(mixup_alpha=0.4, cutmix_alpha=1.0, probability=0.8)


def config(shards: Path, *, workers: int = 0, **augment: Any) -> DataConfig:
    settings = AugmentConfig.model_validate(
        {"size": 16, "progressive": STAGES, "mix": MIX, **augment}
    )
    return DataConfig(shards=shards, image=IMAGE, augment=settings, workers=workers)


def global_pixels(shards: Path, *, world_size: int, workers: int = 0) -> list[torch.Tensor]:
    """Return the pixels of each global batch, concatenated from the shares of all ranks."""
    shape = {"batch": BATCH, "steps": len(SIDES), "world_size": world_size}
    return [
        torch.cat([batch.inputs["pixel_values"] for batch in ranks])
        for ranks in rank_batches(config(shards, workers=workers), Cursor(5), **shape)
    ]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes in total")
@pytest.mark.parametrize(("world_size", "workers"), [(9, 0), (2, 2)])
def test_pixels_of_every_stage_do_not_depend_on_world_size_or_workers(
    shards: Path, world_size: int, workers: int
) -> None:
    one = global_pixels(shards, world_size=1)
    assert [pixels.shape for pixels in one] == [(BATCH, 3, side, side) for side in SIDES]
    many = global_pixels(shards, world_size=world_size, workers=workers)
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


def test_a_stream_has_the_same_stages_as_a_split(shards: Path) -> None:
    tars = tuple(str(path) for path in sorted(shards.glob("train-*.tar")))
    stream = {"shards": tars, "samples": 30, "buffer": 4}
    settings = DataConfig.model_validate(
        {**config(shards, workers=2, mix=None).model_dump(), "stream": stream}
    )
    opened = Stream(settings.stream, Manifest.load(shards))
    for rank in range(2):
        cursor = Cursor(0, samples=2 * BATCH)
        with StreamLoader(
            opened, settings, global_batch=BATCH, rank=rank, world_size=2, cursor=cursor
        ) as loader:
            batches = list(islice(loader, 6))
        for batch, side in zip(batches, SIDES[2:], strict=True):
            assert batch.inputs["pixel_values"].shape == (3 + rank, 3, side, side)


@pytest.mark.parametrize("num_samples", [10, 13])
def test_a_stage_in_epochs_ends_after_the_batch_that_completes_them(num_samples: int) -> None:
    augment = AugmentConfig.model_validate({"progressive": [{"size": 8, "until": {"epochs": 1.5}}]})
    sides = ProgressiveSizes(IMAGE, augment, num_samples=num_samples, global_batch=4)
    ends = -(-3 * num_samples // 8) * 4
    assert {sides.at(samples) for samples in range(0, ends, 4)} == {8}
    assert {sides.at(samples) for samples in range(ends, 100, 4)} == {12}


def test_stages_that_end_at_the_same_time_raise() -> None:
    stages = [{"size": 8, "until": {"epochs": 2}}, {"size": 9, "until": {"steps": 5}}]
    augment = AugmentConfig.model_validate({"progressive": stages})
    with pytest.raises(ValueError, match=r"augment\.progressive: the stage of 9 pixels ends at"):
        ProgressiveSizes(IMAGE, augment, num_samples=10, global_batch=4)
