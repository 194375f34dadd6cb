"""The benchmarks of data loading, at toy size."""

from pathlib import Path

import pytest

from benchmarks import data_images, data_index, data_text

# The endless iterators of webdataset leave their tars open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_images_are_compared_with_every_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_images, "NUM_DRAWN", 8)
    monkeypatch.setattr(data_images, "SECONDS", 0.0)
    rows = list(data_images.rows(None))
    assert len(rows) == sum(map(len, data_images.TARGETS.values()))
    measured = [row.measured for row in rows if "webdataset" in row.what]
    assert len(measured) == 2
    assert all(float(each) > 0 for each in measured)
    for row in rows:  # without a compiler, the row names the packages to install
        assert row.measured or "apt-get install" in row.details


def test_small_images_are_compared_with_every_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NUM_SMALL", 40), ("SMALL_BATCH", 10), ("NUM_SHARDS", 2), ("SECONDS", 0)):
        monkeypatch.setattr(data_images, name, value)
    assert [float(row.measured) > 0 for row in data_images.small()] == [True, True]


def test_texts_are_compared_with_the_tokenizer_and_webdataset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("CLASSES", 20), ("BATCH", 32), ("STEPS", 2), ("SECONDS", 0)):
        monkeypatch.setattr(data_text, name, value)
    assert [float(row.measured) > 0 for row in data_text.rows(None)] == [True, True]


def test_the_shards_of_the_index_benchmark_can_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(data_index, "SAMPLES_PER_SHARD", 20)
    monkeypatch.setattr(data_index, "BATCH", 8)
    data_index.make_shards(tmp_path / "shards", 60)
    opening, _, lookup, first = data_index.measure(tmp_path / "shards", 50)
    assert min(opening, lookup, first) > 0
