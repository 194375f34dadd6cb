"""The offset index of a shard: its contents, and how much of it is loaded into memory."""

import json
import mmap
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from data.shards.index import IndexBuilder, index_path, open_index
from data.shards.manifest import Manifest, ShardInfo
from data.shards.split import open_split

N = 40_000


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Write the index, but not the tar, of a shard with 40,000 samples."""
    builder = IndexBuilder()
    members = {"jpg": b"xyz", "cls": b"1"}
    for i in range(N):
        builder.add(members, offset=i * 2048, sample="jpg", label=i % 7)
    info = ShardInfo(
        file="train-000000.tar",
        split="train",
        samples=N,
        bytes=2048 * N,
        sha256="0" * 64,
        index_crc32=builder.crc32(),
    )
    index_path(tmp_path / info.file).write_bytes(builder.to_bytes(info))
    return tmp_path / info.file


def resident(path: Path) -> int:
    """Return how many bytes of a mapped file are resident in memory."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            counts = line.endswith(str(path))
        elif counts and name == "Rss:":
            total += 1024 * int(values[0])
    return total


def test_an_index_has_30_bytes_per_sample_and_locates_members(large: Path) -> None:
    assert index_path(large).stat().st_size < 30 * N + 1000
    index = open_index(large)
    rows = np.arange(N)
    assert (index.blocks == np.stack([4 * rows + 3, 4 * rows + 1], axis=1)).all()
    assert (index.sizes == [3, 1]).all()
    assert [index.extensions[number] for number in index.extension[N - 1]] == ["jpg", "cls"]
    assert (index.labels == rows % 7).all()


def test_only_the_used_part_of_an_index_is_resident(large: Path) -> None:
    index, file = open_index(large), index_path(large)
    assert resident(file) == 0  # although its checksum was compared
    for column in (index.blocks, index.sizes, index.crc32, index.extension):
        column[:, 0].max()
    index.labels.max()
    assert 17 * N <= resident(file) <= 17 * N + 2 * mmap.PAGESIZE
    index.blocks[:, 1].max()
    assert resident(file) > 21 * N


def test_training_reads_17_contiguous_bytes_per_sample_of_an_index(large: Path) -> None:
    index = open_index(large)
    columns = [index.blocks, index.sizes, index.crc32, index.extension]
    used = [*(column[:, 0] for column in columns), index.labels]
    assert all(part.flags.c_contiguous for part in used)
    starts = [part.__array_interface__["data"][0] for part in used]
    stops = [start + part.nbytes for start, part in zip(starts, used, strict=True)]
    assert max(stops) - min(starts) == sum(part.nbytes for part in used) == 17 * len(index.labels)
    with pytest.raises(ValueError, match="read-only"):
        index.labels[0] = 1


def test_a_split_maps_its_indices_without_keeping_their_files_open(
    shards: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(shards, tmp_path / "copy")

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(str(copy))

    with open_split(copy, "train") as split:
        assert maps() == len(Manifest.load(copy).of_split("train")) > 1
        opened = {str(link.resolve()) for link in Path("/proc/self/fd").iterdir()}
        assert not any(f"{copy}" in name and "index" in name for name in opened)
    del split
    assert maps() == 0


@pytest.mark.parametrize("duplicates", [-1, 1.0, float("inf"), "2", True, None, [[]]])
def test_an_index_with_an_invalid_number_of_duplicates_is_reported_as_damaged(
    large: Path, duplicates: object
) -> None:
    path = index_path(large)
    with safe_open(path, framework="numpy") as file:
        about = json.loads(file.metadata()["kway"])
    about["duplicates"] = duplicates
    save_file(load_file(path), path, metadata={"kway": json.dumps(about)})
    with pytest.raises(ValueError, match=rf"{path} is damaged \(duplicates is "):
        open_index(large)


@pytest.mark.parametrize("deep", [b'{"a":' * 100_000, b'{"__metadata__": {"kway": "%s"}}'])
def test_an_index_with_deeply_nested_json_is_reported_as_damaged(large: Path, deep: bytes) -> None:
    header = deep.replace(b"%s", b"[" * 100_000)
    index_path(large).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(
        ValueError, match=r"is damaged \(.+\): copy it, or run kway shard again"
    ) as caught:
        open_index(large)
    assert "\n" not in str(caught.value)
