"""Duplicate samples are counted from the indices."""

import zlib
from pathlib import Path

import pytest

from data.shards.duplicates import Duplicates, find_duplicates
from data.shards.writing.writer import write_shards
from data.sources import generated
from tests.data.conftest import kway_shard
from tests.data.foreign_tars import Planted
from tests.noise_images import image

# XORing the generator polynomial of CRC-32 into a message does not change its checksum.
POLYNOMIAL = 0x1DB710641

# Of 12 training samples, two are identical, and three are also in test or validation.
TRAIN = [(f"word {i}", f"class {i % 3}", "train") for i in range(11)]
TRAIN.append(("word 4", "class 1", "train"))
TEST = [
    ("new", "class 0", "test"),
    ("word 2", "class 2", "test"),
    ("word 7", "class 0", "test"),
    ("new", "class 0", "test"),
]
VALIDATION = [("word 9", "class 0", "validation"), ("newer", "class 1", "validation")]


def test_duplicates_are_counted_for_each_split(tmp_path: Path) -> None:
    samples = TRAIN + TEST + VALIDATION
    generated.write_shards(samples, tmp_path / "out", modality="text", samples_per_shard=3)
    assert find_duplicates(tmp_path / "out") == (
        Duplicates("train", 12, repeated=1),
        Duplicates("test", 4, in_training=2, other_class=1, repeated=1),
        Duplicates("validation", 2, in_training=1),
    )


def test_equal_size_and_checksum_do_not_make_a_duplicate(tmp_path: Path) -> None:
    one = b"the quick brown fox"
    other = (int.from_bytes(one, "little") ^ POLYNOMIAL).to_bytes(len(one), "little")
    assert zlib.crc32(one) == zlib.crc32(other)
    assert one != other
    write_shards(Planted([(one, "bin", 0), (other, "bin", 1)], 2), tmp_path / "out", workers=0)
    assert find_duplicates(tmp_path / "out") == (Duplicates("train", 2),)


def test_a_damaged_duplicate_raises_an_error_that_names_its_shard(tmp_path: Path) -> None:
    generated.write_shards(TRAIN + TEST, tmp_path / "out", modality="text")
    tar = tmp_path / "out" / "test-000000.tar"
    tar.write_bytes(tar.read_bytes().replace(b"word 7", b"word 8"))
    with pytest.raises(ValueError, match=r"test-000000\.tar: .*: its checksum does not match"):
        find_duplicates(tmp_path / "out")


def test_the_command_reports_duplicates(tmp_path: Path) -> None:
    train = [(image(seed), "ab"[seed % 2], "train") for seed in (1, 2, 3)]
    test = [(image(seed), "ab"[seed % 2], "test") for seed in (3, 4)]
    generated.write_shards(train + test, tmp_path / "out", workers=0)
    kept = kway_shard("check", tmp_path / "out")
    assert kept.exit_code == 0, kept.output
    assert "duplicates: test: 1 of 2 are also in train" in kept.stdout
