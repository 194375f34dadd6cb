"""Global batches do not depend on the world size, the number of workers or a resume."""

from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from data.augment.base import pair_rng
from data.augment.color_jitter import ColorJitter
from data.augment.custom import CustomAugmentation
from data.augment.mix import Mix
from data.augment.rand_augment import RandAugment
from data.augment.training import AugmentConfig
from data.config import DataConfig
from data.images.config import ImageConfig
from data.loading.batch import Cursor
from data.loading.loader import EvalLoader, TrainLoader
from data.shards.split import open_split
from tests.data.rank_batches import rank_batches, row_labels, sample_labels, set_sizes

BATCH = 7


@pytest.fixture(scope="module", params=["one label", "sets"])
def shards(request: pytest.FixtureRequest, shards: Path, label_sets: Path) -> Path:
    """Images with one label or with a set of labels each."""
    return shards if request.param == "one label" else label_sets


class Noise(CustomAugmentation):
    """A user-defined augmentation."""

    def __call__(
        self, image: np.ndarray, fill: tuple[float, ...], rng: np.random.Generator
    ) -> np.ndarray:
        return rng.integers(256, size=image.shape, dtype=np.uint8) // 8 + image // 8 * 7


# Everything that draws random numbers.
AUGMENT = AugmentConfig(
    colour=ColorJitter(brightness=0.4, hue=0.1),
    rand_augment=RandAugment(),
    custom=(Noise(kind="tests.data.test_loader:Noise"),),
    mix=Mix(mixup_alpha=0.4, cutmix_alpha=1.0, probability=0.8),
)


def config(shards: Path, workers: int = 0, augment: AugmentConfig = AUGMENT) -> DataConfig:
    image = ImageConfig(size=12, resize=14)
    return DataConfig(shards=shards, image=image, augment=augment, workers=workers)


def global_batches(
    shards: Path, *, world_size: int, workers: int, steps: int, cursor: Cursor
) -> list[tuple[torch.Tensor, ...]]:
    """Return global batches, each concatenated from the shares of all ranks.

    Each batch consists of pixels, labels, sample indices, second labels and weights, and the sizes
    of both sets of labels.
    """
    found = []
    shape = {"batch": BATCH, "steps": steps, "world_size": world_size}
    # All batches are loaded before any is copied, so a loader that reuses their memory is found.
    loaded = list(rank_batches(config(shards, workers), cursor, **shape))
    for step, ranks in enumerate(loaded, start=1):
        parts: list[tuple[torch.Tensor, ...]] = []
        for rank, batch in enumerate(ranks):
            size = BATCH * (rank + 1) // world_size - BATCH * rank // world_size
            pixels = batch.inputs["pixel_values"]
            assert batch.num_rows == size
            assert pixels.shape == (size, 3, 12, 12)
            assert pixels.dtype == torch.uint8
            assert batch.cursor == Cursor(cursor.seed, cursor.samples + step * BATCH)
            assert batch.mixed is not None
            second = batch.mixed.labels, batch.mixed.weights
            sizes = set_sizes(batch), set_sizes(batch.mixed)
            parts.append((pixels, batch.labels, batch.indices, *second, *sizes))
        found.append(tuple(torch.cat(column) for column in zip(*parts, strict=True)))
    return found


def assert_same(a: list, b: list) -> None:
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        for x, y in zip(left, right, strict=True):
            assert torch.equal(x, y)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes in total")
@pytest.mark.parametrize(("world_size", "workers"), [(3, 0), (8, 0), (1, 1), (2, 3)])
def test_global_batches_do_not_depend_on_world_size_or_workers(
    shards: Path, world_size: int, workers: int
) -> None:
    start = Cursor(seed=5)
    one = global_batches(shards, world_size=1, workers=0, steps=8, cursor=start)
    many = global_batches(shards, world_size=world_size, workers=workers, steps=8, cursor=start)
    assert_same(one, many)


def test_a_run_resumed_mid_epoch_at_another_world_size_continues_exactly(shards: Path) -> None:
    with open_split(shards, "train") as split:
        n = len(split)
    whole = global_batches(shards, world_size=1, workers=0, steps=10, cursor=Cursor(9))
    head = global_batches(shards, world_size=2, workers=0, steps=3, cursor=Cursor(9))
    saved = Cursor.from_json(Cursor(9, samples=3 * BATCH).to_json())
    tail = global_batches(shards, world_size=3, workers=1, steps=7, cursor=saved)
    assert_same(whole, head + tail)
    seen = torch.cat([batch[2] for batch in head + tail]).tolist()
    assert sorted(seen[:n]) == list(range(n))


def test_a_sample_is_mixed_with_its_neighbor_in_the_stream(shards: Path) -> None:
    plain = AUGMENT.model_copy(update={"mix": None})
    with open_split(shards, "train") as split:
        both = (
            TrainLoader(split, config(shards, augment=each), global_batch=5, cursor=Cursor(3))
            for each in (plain, AUGMENT)
        )
        unmixed, together = ([next(loader) for _ in range(4)] for loader in both)
    pixels = torch.cat([batch.inputs["pixel_values"] for batch in unmixed])
    indices = torch.cat([batch.indices for batch in unmixed])
    labels = [labels for batch in unmixed for labels in row_labels(batch)]
    assert all(batch.mixed is None for batch in unmixed)
    kinds = set()
    # With batches of 5, some pairs span two batches.
    for position in range(20):
        batch, row = together[position // 5], position % 5
        mix = AUGMENT.mix.draw(config(shards).image.size, pair_rng(3, position))
        kinds.add(mix.kind)
        want = mix(pixels[position].numpy(), pixels[position ^ 1].numpy())
        assert np.array_equal(batch.inputs["pixel_values"][row], want)
        assert batch.indices[row] == indices[position]
        assert row_labels(batch)[row] == labels[position]
        assert batch.rows(row, row + 1).mixed.labels.tolist() == labels[position ^ 1]
        assert batch.mixed.weights[row] == np.float32(mix.weight)
    assert kinds == {"none", "mixup", "cutmix"}


def test_the_pixels_of_a_sample_differ_between_epochs(shards: Path) -> None:
    # Without Mixup, which would mix a sample with another one in each epoch.
    settings = config(shards, augment=AugmentConfig(crop_area=(0.3, 1.0)))
    with open_split(shards, "train") as split:
        n = len(split)
        loader = TrainLoader(split, settings, global_batch=n, cursor=Cursor(0))
        first, second = next(loader), next(loader)
    assert sorted(first.indices.tolist()) == sorted(second.indices.tolist()) == list(range(n))
    a = first.inputs["pixel_values"][first.indices.argsort()]
    b = second.inputs["pixel_values"][second.indices.argsort()]
    assert (a != b).flatten(1).any(1).float().mean() > 0.9


def test_loading_does_not_change_the_global_random_state(shards: Path) -> None:
    before = torch.get_rng_state()
    global_batches(shards, world_size=1, workers=1, steps=2, cursor=Cursor(0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (3, 0), (50, 0), (2, 1)])
def test_evaluation_reads_every_sample_once_in_the_same_number_of_batches_on_each_rank(
    shards: Path, world_size: int, workers: int
) -> None:
    indices, lengths = [], set()
    with open_split(shards, "train") as split:
        for rank in range(world_size):
            loader = EvalLoader(
                split, config(shards, workers), batch=4, rank=rank, world_size=world_size
            )
            batches = list(loader)
            assert len(batches) == len(loader)
            lengths.add(len(loader))
            for batch in batches:
                assert batch.cursor is None
                assert row_labels(batch) == sample_labels(split, batch.indices)
                indices += batch.indices.tolist()
        assert indices == list(range(len(split)))
    assert len(lengths) == 1


def test_a_flipped_byte_raises_an_error_that_names_its_shard_and_key(copy: Path) -> None:
    with open_split(copy, "train") as split:
        key, data = split.key(3), split.read(3)[0]
    tar = copy / "train-000000.tar"
    content = bytearray(tar.read_bytes())
    content[content.index(data) + len(data) // 2] ^= 1
    tar.write_bytes(content)
    with open_split(copy, "train") as split:
        strict = config(copy, 1).model_copy(update={"max_bad_samples": 0})
        with (
            TrainLoader(split, strict, global_batch=20, cursor=Cursor(0)) as loader,
            pytest.raises(ValueError, match=r"train-000000\.tar") as error,
        ):
            list(islice(loader, 3))
    assert key in str(error.value)
    assert "\n" not in str(error.value)


def test_a_closed_split_has_no_open_files(shards: Path) -> None:
    def opened_tars() -> int:
        return sum(one.path.endswith(".tar") for one in psutil.Process().open_files())

    with open_split(shards, "train") as split:
        for i in range(len(split)):
            split.read(i)
        assert opened_tars() == len(split.manifest.of_split("train"))
    assert opened_tars() == 0


def test_iterating_after_an_error_retries_the_failed_batch(
    shards: Path, copy: Path, tmp_path: Path
) -> None:
    with open_split(copy, "train") as split:
        loader = TrainLoader(split, config(copy), global_batch=BATCH, cursor=Cursor(3))
        next(loader)
        split.close()
        copy.rename(tmp_path / "away")
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                next(loader)
        (tmp_path / "away").rename(copy)
        again = next(loader)
    whole = global_batches(shards, world_size=1, workers=0, steps=2, cursor=Cursor(3))
    assert torch.equal(again.indices, whole[1][2])


def test_batches_do_not_change_while_loader_processes_continue(shards: Path) -> None:
    """A loader process reuses its memory, but must not change batches that it already yielded."""
    kept = global_batches(shards, world_size=1, workers=2, steps=25, cursor=Cursor(3))
    assert_same(kept, global_batches(shards, world_size=1, workers=0, steps=25, cursor=Cursor(3)))
