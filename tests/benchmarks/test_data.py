"""The benchmarks of data loading, at toy size."""

from pathlib import Path

import pytest

from benchmarks import data, data_index

# The endless iterators of webdataset leave their tars open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SECONDS": 0.0, "NUM_DRAWN": 8}
    sizes |= {"NUM_SMALL": 40, "SMALL_BATCH": 10, "NUM_SHARDS": 2}
    sizes |= {"TEXT_CLASSES": 20, "TEXT_BATCH": 32, "TEXT_STEPS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(data, name, value)


def test_images_are_compared_with_every_peer() -> None:
    rows = list(data.crops(None))
    assert len(rows) == 2 * len(data.TARGETS)
    measured = [row.measured for row in rows if "webdataset" in row.what]
    assert len(measured) == 2
    assert all(float(each) > 0 for each in measured)
    for row in rows:  # without a compiler, the row names the packages to install
        assert row.measured or "apt-get install" in row.details


def test_small_images_and_texts_are_compared_with_every_peer() -> None:
    rows = [*data.small(), *data.texts(None)]
    assert [float(row.measured) > 0 for row in rows] == [True] * 4


def test_the_shards_of_the_index_benchmark_can_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(data_index, "SAMPLES_PER_SHARD", 20)
    monkeypatch.setattr(data_index, "BATCH", 8)
    data_index.make_shards(tmp_path / "shards", 60)
    opening, _, lookup, first = data_index.measure(tmp_path / "shards", 50)
    assert min(opening, lookup, first) > 0
