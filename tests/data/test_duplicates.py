"""Duplicate samples are counted from the indices and, on request, dropped from training."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data.shards.duplicates import Duplicates, find_duplicates
from data.shards.manifest import ClassInfo, Manifest, SourceInfo
from data.shards.split import open_split
from data.shards.writing.writer import Written, write_shards
from data.skipped import Skipped
from data.sources import Sample
from launch.commands.shard import app
from tests.data.conftest import write_image

# XORing the generator polynomial of CRC-32 into a message does not change its checksum.
POLYNOMIAL = 0x1DB710641


@dataclass(frozen=True)
class Words:
    """A source of the given (bytes, label) pairs."""

    train: tuple[tuple[bytes, int], ...]
    test: tuple[tuple[bytes, int], ...] = ()
    validation: tuple[tuple[bytes, int], ...] = ()

    modality = "image"

    def describe(self) -> SourceInfo:
        return SourceInfo(kind="words", parameters={"all": repr(self)})

    def classes(self) -> tuple[ClassInfo, ...]:
        return tuple(ClassInfo(name=f"class {label}") for label in range(3))

    def label_vectors(self) -> None:
        return None

    def splits(self) -> dict[str, Sequence[tuple[str, bytes, int]]]:
        return {
            split: [(f"{split}-{i}", *sample) for i, sample in enumerate(samples)]
            for split in ("train", "test", "validation")
            if (samples := getattr(self, split))
        }

    def render(self, task: tuple[str, bytes, int]) -> Sample | Skipped:
        key, data, label = task
        return Skipped(key, "bad") if data == b"bad" else Sample(key, data, "bin", label)


# Of 12 training samples, two are identical, and three are also in test or validation.
TRAIN = (*((f"word {i}".encode(), i % 3) for i in range(11)), (b"word 4", 1))
TEST = ((b"new", 0), (b"word 2", 2), (b"word 7", 0), (b"new", 0))
VALIDATION = ((b"word 9", 0), (b"newer", 1))
SOURCE = Words(TRAIN, TEST, VALIDATION)


def write(folder: Path, source: Words = SOURCE, **options) -> Written:
    return write_shards(source, folder, **{"samples_per_shard": 3, "workers": 1} | options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def samples(folder: Path, split: str) -> list[tuple[bytes, int]]:
    with open_split(folder, split) as opened:
        return sorted((data, label) for data, _, label in map(opened.read, range(len(opened))))


def test_duplicates_are_counted_for_each_split(tmp_path: Path) -> None:
    write(tmp_path)
    assert find_duplicates(tmp_path) == (
        Duplicates("train", 12, repeated=1),
        Duplicates("test", 4, in_training=2, other_class=1, repeated=1),
        Duplicates("validation", 2, in_training=1),
    )
    line = str(find_duplicates(tmp_path)[1])
    assert line.startswith("test: 2 of 4 are also in train, 1 of them with another class; 1 of 4")


def test_the_counts_match_their_definition(tmp_path: Path) -> None:
    write(tmp_path)
    train, test = samples(tmp_path, "train"), samples(tmp_path, "test")
    (_, found, _) = find_duplicates(tmp_path)
    known = {data for data, _ in train}
    assert found.in_training == sum(data in known for data, _ in test)
    assert found.other_class == sum(
        data in known and (data, label) not in train for data, label in test
    )
    assert found.repeated == len(test) - len({data for data, _ in test})


@pytest.mark.parametrize("workers", [1, 2])
def test_duplicates_are_dropped_only_from_training(tmp_path: Path, workers: int) -> None:
    written = write(tmp_path / "out", workers=workers, drop_duplicates=True)
    held_out = {data for data, _ in TEST + VALIDATION}
    assert samples(tmp_path / "out", "train") == sorted(s for s in TRAIN if s[0] not in held_out)
    assert samples(tmp_path / "out", "test") == sorted(TEST)
    assert samples(tmp_path / "out", "validation") == sorted(VALIDATION)
    assert (written.duplicates, written.num_skipped) == (3, 0)
    assert Manifest.load(tmp_path / "out").splits == ("train", "test", "validation")
    assert [found.in_training for found in find_duplicates(tmp_path / "out")] == [0, 0, 0]


def test_bad_samples_and_duplicates_are_counted_separately(tmp_path: Path) -> None:
    source = Words((*TRAIN, (b"bad", 0)), TEST)
    written = write(tmp_path / "out", source, drop_duplicates=True)
    assert (written.duplicates, written.num_skipped) == (2, 1)


@pytest.mark.parametrize("stop_at", [5, 9, 11, 15])
def test_an_interrupted_run_resumes_with_the_same_counts(tmp_path: Path, stop_at: int) -> None:
    def stop(done: int, total: int) -> None:
        assert total == 18
        if done == stop_at:
            raise KeyboardInterrupt

    whole = write(tmp_path / "whole", drop_duplicates=True)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", drop_duplicates=True, report=stop)
    written = write(tmp_path / "out", drop_duplicates=True)
    assert written.resumed > 0
    assert (written.duplicates, written.num_skipped) == (3, 0)
    assert (whole.duplicates, whole.num_skipped) == (3, 0)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_lost_training_shard_is_written_again_without_duplicates(tmp_path: Path) -> None:
    write(tmp_path, drop_duplicates=True)
    before = contents(tmp_path)
    for lost in ("train-000001.tar", "test-000000.tar"):
        (tmp_path / lost).unlink()
    assert write(tmp_path, drop_duplicates=True).duplicates == 3
    assert contents(tmp_path) == before


def test_a_shard_that_contains_only_duplicates_is_not_written(tmp_path: Path) -> None:
    source = Words(((b"a", 0), (b"b", 1)), ((b"a", 0), (b"c", 1)))
    written = write(tmp_path, source, samples_per_shard=1, drop_duplicates=True)
    assert written.duplicates == 1
    assert samples(tmp_path, "train") == [(b"b", 1)]


def test_equal_size_and_checksum_do_not_make_a_duplicate(tmp_path: Path) -> None:
    one = b"the quick brown fox"
    other = (int.from_bytes(one, "little") ^ POLYNOMIAL).to_bytes(len(one), "little")
    assert zlib.crc32(one) == zlib.crc32(other)
    assert one != other
    source = Words(((one, 0), (b"b", 1)), ((other, 0),))
    assert write(tmp_path, source, drop_duplicates=True).duplicates == 0
    assert samples(tmp_path, "train") == [(b"b", 1), (one, 0)]
    assert [found.in_training for found in find_duplicates(tmp_path)] == [0, 0]


def test_shards_with_and_without_duplicates_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ValueError, match=r"not words.*drop_duplicates=True"):
        write(tmp_path, drop_duplicates=True)


def test_a_damaged_duplicate_raises_an_error_that_names_its_shard(tmp_path: Path) -> None:
    write(tmp_path, Words(TRAIN, TEST), samples_per_shard=100)
    tar = tmp_path / "test-000000.tar"
    content = tar.read_bytes()
    tar.write_bytes(content.replace(b"word 7", b"word 8"))
    with pytest.raises(ValueError, match=r"test-000000\.tar: sample \d is damaged"):
        find_duplicates(tmp_path)


def test_the_command_reports_and_drops_duplicates(tmp_path: Path) -> None:
    for split, seeds in (("train", (1, 2, 3)), ("test", (3, 4))):
        for seed in seeds:
            write_image(tmp_path / "in" / split / "ab"[seed % 2] / f"{seed}.png", seed)
    write_image(tmp_path / "in/train/a/3.png", 3)
    arguments = ["imagefolder", str(tmp_path / "in"), "-o"]
    kept = CliRunner().invoke(app, [*arguments, str(tmp_path / "kept")])
    assert kept.exit_code == 0, kept.output
    assert "duplicates: test: 1 of 2 are also in train" in kept.stdout
    assert "--drop-duplicates" in kept.stdout
    dropped = CliRunner().invoke(app, [*arguments, str(tmp_path / "less"), "--drop-duplicates"])
    assert dropped.exit_code == 0, dropped.output
    assert "removed from training: 2 duplicates of samples in other splits" in dropped.stdout
    assert "also in train" not in dropped.stdout
    assert "2 train + 2 test" in dropped.stdout


@pytest.mark.parametrize("command", ["imagenet", "cifar100", "cifar10", "mnist"])
def test_every_command_prints_its_help(command: str) -> None:
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
