"""A bad sample is replaced by the same substitute on every topology, up to a limit."""

import logging
from pathlib import Path

import pytest
import torch

from data.augment.training import AugmentConfig
from data.config import DataConfig
from data.images.config import ImageConfig
from data.loading.batch import Batch, Cursor
from data.loading.loader import EvalLoader, TrainLoader
from data.shards.manifest import Manifest
from data.shards.mixture import load_manifest, open_mixture
from data.shards.split import BadSampleError, open_split
from tests.data.foreign_tars import bomb, planted_shards, png
from tests.data.rank_batches import rank_batches, row_labels, sample_labels, set_sizes

BATCH = 8
BAD = {3: b"this is text", 17: bomb(), 22: png(1)[:300]}


@pytest.fixture(scope="module", params=[False, True], ids=["one label", "sets"])
def sets(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory, sets: bool) -> Path:
    return planted_shards(tmp_path_factory.mktemp("damaged") / "out", BAD, sets=sets)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory, sets: bool) -> Path:
    return planted_shards(tmp_path_factory.mktemp("intact") / "out", {}, sets=sets)


def config(shards: Path, *, workers: int = 0, limit: int = 10) -> DataConfig:
    return DataConfig(
        shards=shards,
        image=ImageConfig(size=12),
        augment=AugmentConfig(crop_area=(0.5, 1.0)),
        workers=workers,
        max_bad_samples=limit,
    )


def batches(
    shards: Path,
    steps: int,
    *,
    world_size: int = 1,
    workers: int = 0,
    limit: int = 10,
) -> list[list[Batch]]:
    """Return the batches of each step, one per rank."""
    settings = config(shards, workers=workers, limit=limit)
    shape = {"batch": BATCH, "steps": steps, "world_size": world_size}
    return list(rank_batches(settings, Cursor(5), **shape))


def bad_indices(shards: Path) -> set[int]:
    """Return the positions of `BAD` within the shuffled split."""
    with open_split(shards, "train") as split:
        keys = [split.key(i) for i in range(len(split))]
    return {keys.index(f"{number:05d}") for number in BAD}


def test_only_the_rows_of_bad_samples_change(damaged: Path, intact: Path) -> None:
    bad = bad_indices(damaged)
    all_replaced = []
    for (ours,), (theirs,) in zip(batches(damaged, 8), batches(intact, 8), strict=True):
        assert torch.equal(ours.indices, theirs.indices)
        for row, index in enumerate(ours.indices.tolist()):
            same = torch.equal(ours.inputs["pixel_values"][row], theirs.inputs["pixel_values"][row])
            assert same == (index not in bad)
        replaced = [index for index in ours.indices.tolist() if index in bad]
        assert [one.index for one in ours.substitutes] == replaced
        all_replaced += replaced
    assert len(all_replaced) > len(bad) == len(set(all_replaced))


def test_a_replaced_sample_gets_the_label_of_its_substitute(damaged: Path) -> None:
    with open_split(damaged, "train") as split:
        for (batch,) in batches(damaged, 8):
            by = {one.index: one.by for one in batch.substitutes}
            used = [by.get(index, index) for index in batch.indices.tolist()]
            assert row_labels(batch) == sample_labels(split, used)


@pytest.mark.parametrize(("world_size", "workers"), [(3, 0), (2, 1)])
def test_substitutes_do_not_depend_on_world_size_or_workers(
    damaged: Path, world_size: int, workers: int
) -> None:
    one = batches(damaged, 5)
    many = batches(damaged, 5, world_size=world_size, workers=workers)
    for (whole,), parts in zip(one, many, strict=True):
        assert whole.substitutes == tuple(s for part in parts for s in part.substitutes)
        for ours, theirs in (
            (whole.labels, [part.labels for part in parts]),
            (set_sizes(whole), [set_sizes(part) for part in parts]),
            (whole.inputs["pixel_values"], [part.inputs["pixel_values"] for part in parts]),
        ):
            assert torch.equal(ours, torch.cat(theirs))
    assert any(whole.substitutes for (whole,) in one)


def test_a_substitute_is_never_bad_itself(tmp_path: Path) -> None:
    bad = dict.fromkeys(range(30), b"this is text")
    ((batch,),) = batches(planted_shards(tmp_path / "one", {**bad, 11: png(11)}), 1, limit=30)
    assert batch.labels.tolist() == [11 % 3] * BATCH
    assert len(batch.substitutes) >= BATCH - 1
    assert len({one.by for one in batch.substitutes}) == 1
    with pytest.raises(BadSampleError, match="not an image"):
        batches(planted_shards(tmp_path / "none", bad), 1, limit=30)


def test_every_bad_sample_is_logged_once_with_shard_and_key(
    damaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kway.data"):
        batches(damaged, 12)  # three epochs
    assert len(caplog.messages) == len(BAD)
    for number in BAD:
        assert sum(f".tar: {number:05d}: " in line for line in caplog.messages) == 1


def test_a_bad_sample_is_counted_once_over_any_number_of_epochs(damaged: Path) -> None:
    every = batches(damaged, 12, limit=len(BAD))
    cursor = every[-1][0].cursor
    assert cursor is not None
    assert cursor.bad == tuple(sorted(bad_indices(damaged)))
    assert sum(len(batch.substitutes) for (batch,) in every) > len(BAD)


@pytest.mark.parametrize(("limit", "workers"), [(0, 0), (2, 1)])
def test_more_bad_samples_than_the_limit_raise_an_error_that_lists_them(
    damaged: Path, limit: int, workers: int
) -> None:
    with pytest.raises(ValueError, match=f"data.max_bad_samples is {limit}") as error:
        batches(damaged, 12, limit=limit, workers=workers)
    message = str(error.value)
    assert "\n" not in message
    named = sum(f".tar: {number:05d}: " in message for number in BAD)
    assert named > limit  # several may be in one batch
    assert message.startswith(f"{named} bad sample")


def test_bad_samples_found_before_a_resume_are_counted(damaged: Path) -> None:
    bad = sorted(bad_indices(damaged))
    saved = Cursor.from_json(Cursor(5, samples=2 * BATCH, bad=tuple(bad)).to_json())
    assert saved.bad == tuple(bad)
    with open_split(damaged, "train") as split:
        loader = TrainLoader(split, config(damaged, limit=2), global_batch=BATCH, cursor=saved)
        with pytest.raises(ValueError, match="3 bad samples"):
            next(loader)


def test_bad_samples_of_other_ranks_are_counted(damaged: Path) -> None:
    bad = sorted(bad_indices(damaged))
    with open_split(damaged, "train") as split:
        loader = TrainLoader(split, config(damaged, limit=2), global_batch=BATCH, cursor=Cursor(5))
        loader.add_bad(bad[:2])
        assert loader.cursor.bad == tuple(bad[:2])
        with pytest.raises(ValueError, match=r"3 bad samples.*\.tar: 000\d\d: bad on another"):
            loader.add_bad(bad[1:])


def test_a_cursor_from_an_older_checkpoint_has_no_bad_samples() -> None:
    assert Cursor.from_json({"seed": 1, "samples": 2}) == Cursor(1, 2)


@pytest.mark.parametrize("label", [7, -1])
def test_opening_a_split_with_a_label_that_is_not_a_class_raises(
    tmp_path: Path, sets: bool, label: int
) -> None:
    bad = planted_shards(tmp_path / "out", {}, labels={4: [label] if sets else label}, sets=sets)
    message = rf"\.tar has label {label}, but the manifest has 3 classes"
    with pytest.raises(ValueError, match=message):
        open_split(bad, "train")
    mixture = DataConfig(shards=bad, image=ImageConfig(size=12), mixture=[{"shards": bad}])
    with pytest.raises(ValueError, match=message):
        open_mixture(mixture, load_manifest(mixture))


def test_an_index_that_was_cached_for_more_classes_is_checked_again(intact: Path) -> None:
    open_split(intact, "train").close()
    manifest = Manifest.load(intact)
    fewer = manifest.model_copy(update={"classes": manifest.classes.of_names(["a", "b"])})
    with pytest.raises(ValueError, match=r"\.tar has label 2, but the manifest has 2 classes"):
        open_split(intact, "train", manifest=fewer)


def test_evaluation_raises_for_a_bad_sample(damaged: Path) -> None:
    with (
        open_split(damaged, "train") as split,
        pytest.raises(ValueError, match=r"train-00000\d\.tar: 000\d\d: "),
    ):
        list(EvalLoader(split, config(damaged), batch=8))
