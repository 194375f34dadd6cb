"""A mixture of shard sets: weights, united classes, and the guarantees of the order of samples."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.config import DataConfig
from data.images.config import ImageConfig
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.loading.sampling import sampled_order, training_counts
from data.remote.config import CacheConfig
from data.shards import mixture as mixtures
from data.shards.mixture import load_manifest, open_mixture
from data.shards.split import Split, open_split
from data.shards.writing.writer import write_shards
from data.sources import ImageFolder
from tests.data.conftest import write_image

BATCH = 7
SETS = {"first": {"apple": 9, "birne": 12, "kiwi": 1}, "second": {"date": 5, "apple": 30}}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two sets of shards that share the class "apple", each with a test split."""
    found = {}
    for number, (name, classes) in enumerate(SETS.items()):
        folder = tmp_path_factory.mktemp(name)
        for label, (class_name, count) in enumerate(classes.items()):
            for i in range(count):
                path = folder / "images" / "train" / class_name / f"{i}.png"
                write_image(path, 1000 * number + 100 * label + i, 100, 100)
            write_image(folder / "images" / "test" / class_name / "0.png", 77)
        source = ImageFolder(folder / "images", original=True)
        write_shards(source, folder / "out", samples_per_shard=8, workers=0)
        found[name] = folder / "out"
    return found


def config(
    sets: dict[str, Any], weights: tuple[float, float] = (1, 3), **changes: Any
) -> DataConfig:
    names = zip(sets.values(), weights, strict=True)
    return DataConfig(
        shards=sets["first"],
        image=ImageConfig(size=12, resize=14),
        mixture=[{"shards": folder, "weight": weight} for folder, weight in names],
        **changes,
    )


def opened(settings: DataConfig) -> Split:
    return open_mixture(settings, load_manifest(settings))


def test_the_class_list_starts_with_that_of_data_shards(sets: dict[str, Path]) -> None:
    manifest = load_manifest(config(sets))
    assert manifest.class_names == ("apple", "birne", "kiwi", "date")
    other = config(sets).model_copy(update={"shards": sets["second"]})
    assert load_manifest(other).class_names == ("apple", "date", "birne", "kiwi")


def test_a_long_united_class_list_is_mapped_from_the_cache(
    sets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_manifest(config(sets)).classes
    monkeypatch.setattr(mixtures, "MAX_INLINE_CLASSES", 2)
    for _ in range(2):
        found = load_manifest(config(sets, cache=CacheConfig(folder=tmp_path))).classes
        assert found == expected
        (path,) = tmp_path.glob("*.classes")
        assert path.name.encode() in pickle.dumps(found)
        path.write_bytes(path.read_bytes()[:20])  # a damaged file is written again
    unused = CacheConfig(folder=tmp_path / "unused")
    alone = config(sets, cache=unused).model_copy(update={"mixture": []})
    assert len(load_manifest(alone).classes) == 3
    monkeypatch.setattr(mixtures, "MAX_INLINE_CLASSES", 8)
    assert load_manifest(config(sets, cache=unused)) is not None
    assert not unused.folder.exists()


def test_samples_have_the_labels_of_the_united_class_list(sets: dict[str, Path]) -> None:
    with opened(config(sets)) as mixture:
        assert len(mixture) == 57
        names = mixture.manifest.class_names
        indices = np.random.default_rng(0).permutation(57)
        labels, contents = mixture.read_many(indices)
        many = list(zip(contents, labels.tolist(), strict=True))
        sizes = mixture.sizes(indices)
        first = 0
        for folder in sets.values():
            with open_split(folder, "train") as split:
                for i in range(len(split)):
                    data, extension, label = split.read(i)
                    name = split.classes[label].name
                    assert mixture.read(first + i) == (data, extension, names.index(name))
                    assert mixture.key(first + i) == split.key(i)
                    at = int(np.flatnonzero(indices == first + i)[0])
                    assert many[at] == (data, names.index(name))
                    assert sizes[at] == len(data)
                first += len(split)
        with pytest.raises(IndexError):
            mixture.read(57)
        copy = pickle.loads(pickle.dumps(mixture))
        assert copy.read(40) == mixture.read(40)
        assert b"kiwi" not in pickle.dumps(mixture)


@pytest.mark.parametrize("power", [1.0, 0.5, 0.0])
def test_an_epoch_contains_the_shares_of_the_sets_and_their_classes(
    sets: dict[str, Path], power: float
) -> None:
    settings = config(sets, sampling={"power": power, "epoch_samples": 4000})
    with opened(settings) as mixture:
        order = sampled_order(mixture, settings, seed=1)
        indices = order.locate(np.arange(4000))[1]
        assert abs(np.count_nonzero(indices < 22) - 1000) <= 1
        counts = np.bincount([mixture.read(i)[2] for i in range(57)], minlength=4)
        drawn = np.bincount([mixture.read(i)[2] for i in indices.tolist()], minlength=4)
        assert counts.tolist() == [39, 12, 1, 5]
        assert np.abs(drawn - training_counts(mixture, settings)).max() <= 2
        first, second = (np.array(list(classes.values())) ** power for classes in SETS.values())
        expected = 1000 * first / first.sum(), 3000 * second / second.sum()
        together = [expected[0][0] + expected[1][1], *expected[0][1:], expected[1][0]]
        assert np.abs(drawn - together).max() <= 2


def test_sets_of_different_modalities_are_rejected(sets: dict[str, Path], texts: Path) -> None:
    settings = config({"first": sets["first"], "second": texts / "shards"})
    with pytest.raises(ValueError, match=r"contains texts, but .* contains images"):
        load_manifest(settings)
    missing = (
        settings.model_copy(update={"mixture": config(sets).mixture[:1]})
        .mixture[0]
        .model_copy(update={"split": "other"})
    )
    with pytest.raises(ValueError, match=r"data\.mixture\[0\]\.split is 'other'"):
        opened(settings.model_copy(update={"mixture": (missing,)}))


def test_sets_at_urls_must_fit_in_the_cache_together(sets: dict[str, Path], tmp_path: Path) -> None:
    urls = {name: f"file://{folder}" for name, folder in sets.items()}
    size = sum(path.stat().st_size for folder in sets.values() for path in folder.glob("train*"))
    found = []
    for each in (
        config(sets),
        config(urls, cache=CacheConfig(folder=tmp_path, gigabytes=2 * size / 1e9)),
    ):
        with opened(each) as mixture:
            loader = TrainLoader(mixture, each, global_batch=BATCH, cursor=Cursor(2))
            found.append([next(loader).indices.tolist() for _ in range(9)])
    assert found[0] == found[1]
    small = config(urls, cache=CacheConfig(folder=tmp_path / "small", gigabytes=0.8 * size / 1e9))
    with opened(small) as mixture, pytest.raises(ValueError, match=r"data\.cache\.gigabytes is"):
        TrainLoader(mixture, small, global_batch=BATCH, cursor=Cursor(2))
