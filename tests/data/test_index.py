"""The offset index of a shard, and the index of a split that is built from them."""

from pathlib import Path

import numpy as np
import pytest

from data.remote.config import CacheConfig
from data.shards.index import IndexBuilder, index_path
from data.shards.manifest import Manifest
from data.shards.split import open_split
from tests.data.conftest import open_index

N = 40_000


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Write the index, but not the tar, of a shard with 40,000 samples."""
    builder = IndexBuilder()
    members = {"jpg": b"xyz", "cls": b"1"}
    for i in range(N):
        builder.add(members, offset=i * 2048, sample="jpg", label=i % 7)
    info = builder.info("train-000000.tar", "train", size=2048 * N, sha256="0" * 64)
    index_path(tmp_path / info.file).write_bytes(builder.to_bytes(info))
    return tmp_path / info.file


def test_an_index_has_30_bytes_per_sample_and_locates_members(large: Path) -> None:
    assert index_path(large).stat().st_size < 30 * N + 1000
    index = open_index(large)
    rows = np.arange(N)
    assert (index.blocks == np.stack([4 * rows + 3, 4 * rows + 1], axis=1)).all()
    assert (index.sizes == [3, 1]).all()
    assert [index.extensions[number] for number in index.extension[N - 1]] == ["jpg", "cls"]
    assert (index.labels == rows % 7).all()


def test_a_split_index_maps_17_bytes_per_sample_once_for_all_shards(
    copy: Path, tmp_path: Path
) -> None:
    cache = CacheConfig(folder=tmp_path / "cache")
    num_samples = sum(shard.samples for shard in Manifest.load(copy).of_split("train"))
    with open_split(copy, "train", cache=cache) as split:
        expected = [split.read(i) for i in range(len(split))]
    (path,) = (tmp_path / "cache").glob("*.split-index")
    assert path.stat().st_size == 17 * num_samples + (1 << 16)
    built = path.stat().st_ino
    with open_split(copy, "train", cache=cache) as split:
        assert [split.read(i) for i in range(len(split))] == expected
    assert path.stat().st_ino == built


def test_a_damaged_split_index_is_built_again(
    shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = CacheConfig(folder=tmp_path / "cache")
    with open_split(shards, "train", cache=cache) as split:
        labels = split.labels
    (path,) = (tmp_path / "cache").glob("*.split-index")
    content = bytearray(path.read_bytes())
    for position in (5, 12 * len(labels) + 1, 16 * len(labels), len(content) - (1 << 16) + 2):
        path.write_bytes(content[:position] + b"x" + content[position + 1 :])
        with open_split(shards, "train", cache=cache) as split:
            assert (split.labels == labels).all()
        assert f"{path} is damaged: building it again" in caplog.text
        caplog.clear()


def test_a_split_index_follows_a_changed_index_of_a_shard(copy: Path, tmp_path: Path) -> None:
    cache = CacheConfig(folder=tmp_path / "cache")
    open_split(copy, "train", cache=cache).close()
    path = index_path(copy / "train-000000.tar")
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match=rf"{path} is damaged \(its checksum does not match\)"):
        open_split(copy, "train", cache=cache)


def test_a_split_can_be_opened_without_a_writable_cache(
    shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with open_split(shards, "train") as split:
        expected = [split.read(i) for i in range(len(split))]
    with open_split(shards, "train", cache=CacheConfig(folder=tmp_path / "file" / "x")) as split:
        assert [split.read(i) for i in range(len(split))] == expected
    assert "keeping the index of" in caplog.text


@pytest.mark.parametrize("deep", [b'{"a":' * 100_000, b'{"__metadata__": {"kway": "%s"}}'])
def test_an_index_with_deeply_nested_json_is_reported_as_damaged(large: Path, deep: bytes) -> None:
    header = deep.replace(b"%s", b"[" * 100_000)
    index_path(large).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"is damaged \(.+\)") as caught:
        open_index(large)
    assert "\n" not in str(caught.value)
