"""Duplicate samples are counted from the indices."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from data.classes.class_list import ClassInfo
from data.shards.duplicates import Duplicates, find_duplicates
from data.shards.writing.writer import Written, write_shards
from data.sources import ImageFolder, Sample, Source
from tests.data.conftest import kway_shard, write_image

# XORing the generator polynomial of CRC-32 into a message does not change its checksum.
POLYNOMIAL = 0x1DB710641


@dataclass(frozen=True)
class Words(Source):
    """A source of the given (bytes, label) pairs."""

    train: tuple[tuple[bytes, int], ...]
    test: tuple[tuple[bytes, int], ...] = ()
    validation: tuple[tuple[bytes, int], ...] = ()

    kind = "words"
    modality = "image"

    def parameters(self) -> dict[str, Any]:
        return {"all": repr(self)}

    def classes(self) -> tuple[ClassInfo, ...]:
        return tuple(ClassInfo(name=f"class {label}") for label in range(3))

    def splits(self) -> dict[str, Sequence[tuple[str, bytes, int]]]:
        return {
            split: [(f"{split}-{i}", *sample) for i, sample in enumerate(samples)]
            for split in ("train", "test", "validation")
            if (samples := getattr(self, split))
        }

    def render(self, task: tuple[str, bytes, int]) -> Sample:
        key, data, label = task
        return Sample(key, data, "bin", label)


# Of 12 training samples, two are identical, and three are also in test or validation.
TRAIN = (*((f"word {i}".encode(), i % 3) for i in range(11)), (b"word 4", 1))
TEST = ((b"new", 0), (b"word 2", 2), (b"word 7", 0), (b"new", 0))
VALIDATION = ((b"word 9", 0), (b"newer", 1))
SOURCE = Words(TRAIN, TEST, VALIDATION)


def write(folder: Path, source: Words | ImageFolder = SOURCE, **options) -> Written:
    return write_shards(source, folder, **{"samples_per_shard": 3, "workers": 1} | options)


def test_duplicates_are_counted_for_each_split(tmp_path: Path) -> None:
    write(tmp_path)
    assert find_duplicates(tmp_path) == (
        Duplicates("train", 12, repeated=1),
        Duplicates("test", 4, in_training=2, other_class=1, repeated=1),
        Duplicates("validation", 2, in_training=1),
    )
    line = str(find_duplicates(tmp_path)[1])
    assert line.startswith("test: 2 of 4 are also in train, 1 of them with another class; 1 of 4")


def test_equal_size_and_checksum_do_not_make_a_duplicate(tmp_path: Path) -> None:
    one = b"the quick brown fox"
    other = (int.from_bytes(one, "little") ^ POLYNOMIAL).to_bytes(len(one), "little")
    assert zlib.crc32(one) == zlib.crc32(other)
    assert one != other
    write(tmp_path, Words(((one, 0), (b"b", 1)), ((other, 0),)))
    assert [found.in_training for found in find_duplicates(tmp_path)] == [0, 0]


def test_a_damaged_duplicate_raises_an_error_that_names_its_shard(tmp_path: Path) -> None:
    write(tmp_path, Words(TRAIN, TEST), samples_per_shard=100)
    tar = tmp_path / "test-000000.tar"
    content = tar.read_bytes()
    tar.write_bytes(content.replace(b"word 7", b"word 8"))
    with pytest.raises(ValueError, match=r"test-000000\.tar: test-2: its checksum does not match"):
        find_duplicates(tmp_path)


def test_the_command_reports_duplicates(tmp_path: Path) -> None:
    for split, seeds in (("train", (1, 2, 3)), ("test", (3, 4))):
        for seed in seeds:
            write_image(tmp_path / "in" / split / "ab"[seed % 2] / f"{seed}.png", seed)
    write_image(tmp_path / "in/train/a/3.png", 3)
    write(tmp_path / "out", ImageFolder(tmp_path / "in"))
    kept = kway_shard("check", tmp_path / "out")
    assert kept.exit_code == 0, kept.output
    assert "duplicates: test: 1 of 2 are also in train" in kept.stdout
