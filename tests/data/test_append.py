"""Appended samples are a new generation of a set. Earlier generations do not change, even if the
process is killed.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from data.config import DataConfig
from data.images.config import ImageConfig
from data.inspection.verify import damages
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.messages import Report, silent
from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import MANIFEST, ClassInfo, Manifest, SourceInfo
from data.shards.mixture import load_manifest, open_mixture
from data.shards.split import open_split
from data.shards.writing.append import append_shards
from data.shards.writing.writer import write_shards
from data.skipped import SKIPPED, Skipped
from data.sources import ImageFolder, Sample
from data.sources.label_vectors import WithLabelVectors
from data.tars.indexing import index_shards
from launch.commands import shard
from launch.commands.shard import app
from tests.data.conftest import write_image
from tests.data.foreign_tars import write_tar
from tests.ranks import forked
from tests.waiting import wait_until


class Texts:
    """A source of texts: for each split, the texts `first`, `first + 1`, ..., one class after
    another.

    names: the class names. width: the number of entries of the label vectors, or 0 for none. bad: a
    text that is skipped.
    """

    modality = "text"

    def __init__(
        self,
        names: Sequence[str],
        *,
        first: int = 0,
        train: int = 10,
        splits: dict[str, int] | None = None,
        width: int = 0,
        bad: int = -1,
    ) -> None:
        self.names, self.first, self.width, self.bad = tuple(names), first, width, bad
        self.sizes = {"train": train, **({"test": 4} if splits is None else splits)}

    def describe(self) -> SourceInfo:
        parameters: dict[str, Any] = {"names": " ".join(self.names), "first": self.first}
        return SourceInfo(kind="texts", parameters={**parameters, **self.sizes})

    def classes(self) -> tuple[ClassInfo, ...]:
        return tuple(ClassInfo(name=name) for name in self.names)

    def label_vectors(self) -> np.ndarray | None:
        rows = [np.full(self.width, ord(name[0]), np.float32) for name in self.names]
        return np.stack(rows) if self.width else None

    def splits(self) -> dict[str, Sequence[int]]:
        starts = np.cumsum([self.first, *self.sizes.values()]).tolist()
        return {
            split: range(start, start + size)
            for (split, size), start in zip(self.sizes.items(), starts, strict=False)
        }

    def render(self, task: int) -> Sample | Skipped:
        if task == self.bad:
            return Skipped(f"{task:04d}", "bad")
        return Sample(f"{task:04d}", f"text {task}".encode(), "txt", task % len(self.names))


def append(source: Any, folder: Path, **options: Any) -> Manifest:
    options = {"samples_per_shard": 3, "workers": 0, **options}
    return append_shards(source, folder, **options).manifest


def write(source: Any, folder: Path, **options: Any) -> Manifest:
    return write_shards(source, folder, samples_per_shard=4, workers=0, **options).manifest


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def samples(folder: Path, split: str, generation: int | None = None) -> list[tuple[str, bytes]]:
    """Return the (class name, text) of each sample of a split, in order."""
    manifest = Manifest.load(folder, generation=generation)
    with open_split(folder, split, manifest=manifest) as opened:
        read = (opened.read(i) for i in range(len(opened)))
        return [(opened.classes[label].name, data) for data, _, label in read]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write(Texts(["b", "a"]), tmp_path / "set")
    return tmp_path / "set"


# ---------------------------------------------------------------- what is appended


@pytest.mark.parametrize("seed", range(6))
def test_an_appended_set_contains_the_samples_of_all_sources_in_order(
    seed: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    names, sources, first = list("abcdefgh"), [], 0
    for _ in range(4):
        chosen = rng.choice(names, rng.integers(1, 6), replace=False).tolist()
        sizes = {split: int(rng.integers(1, 12)) for split in ("test", "dev")[: rng.integers(3)]}
        train = int(rng.integers(1, 20))
        sources.append(Texts(chosen, first=first, train=train, splits=sizes))
        first += train + sum(sizes.values())
    write(sources[0], tmp_path / "set")
    for number, source in enumerate(sources):
        write(source, tmp_path / str(number))
        if number:
            append(source, tmp_path / "set", samples_per_shard=4)
    found = Manifest.load(tmp_path / "set")
    for split in found.splits:
        expected = [
            sample
            for number, source in enumerate(sources)
            if split in source.sizes
            for sample in samples(tmp_path / str(number), split)
        ]
        assert samples(tmp_path / "set", split) == expected
        assert max(Counter(expected).values()) == 1
    # The same classes and samples as a mixture of the sets.
    sets = [{"shards": str(tmp_path / str(number))} for number in range(4)]
    mixed = DataConfig(shards=tmp_path / "0", mixture=sets)
    assert found.class_names == load_manifest(mixed).class_names
    with open_mixture(mixed, load_manifest(mixed)) as mixture:
        read = [mixture.read(i) for i in range(len(mixture))]
    with open_split(tmp_path / "set", "train") as split:
        assert [split.read(i) for i in range(len(split))] == read
    assert list(damages(tmp_path / "set", lambda done, total: None)) == []


def test_existing_files_labels_and_digests_do_not_change(base: Path) -> None:
    before, first = contents(base), Manifest.load(base)
    times = {path: path.stat().st_mtime_ns for path in base.glob("*-*")}
    second = append(Texts(["c", "b"], first=50), base)
    third = append(Texts(["a", "d"], first=90, splits={"dev": 2}), base)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert {name: contents(base)[name] for name in before if name != MANIFEST} == {
        name: content for name, content in before.items() if name != MANIFEST
    }
    assert third.class_names == ("b", "a", "c", "d")
    assert (first.generation, second.generation, third.generation) == (1, 2, 3)
    # Versions of kway that do not know generations read only format version 1.
    assert (first.format_version, second.format_version, third.format_version) == (1, 2, 2)
    assert third.of_generation(1, origin=base) == first
    assert third.of_generation(1, origin=base).to_bytes() == before[MANIFEST]
    assert third.of_generation(2, origin=base).to_bytes() == second.to_bytes()
    assert Manifest.load(base) == third
    assert Manifest.load(base, generation=2) == second
    assert [source.parameters["first"] for source in third.sources] == [0, 50, 90]
    assert third.splits == ("train", "test", "dev")
    assert samples(base, "train", 1) == samples(base, "train")[:10]


def test_new_shards_continue_the_numbers_of_each_split(base: Path) -> None:
    append(Texts(["a"], first=50, train=4, splits={"dev": 1}), base)
    names = [shard.file for shard in Manifest.read(base).shards]
    assert names[:4] == [f"train-00000{n}.tar" for n in range(3)] + ["test-000000.tar"]
    assert names[4:] == ["train-000003.tar", "train-000004.tar", "dev-000000.tar"]


def test_the_bytes_do_not_depend_on_the_number_of_workers(base: Path, tmp_path: Path) -> None:
    other = shutil.copytree(base, tmp_path / "other")
    append(Texts(["c", "a"], first=50), base, workers=0)
    append(Texts(["c", "a"], first=50), other, workers=2)
    assert contents(base) == contents(other)


def test_appending_the_same_source_again_changes_nothing(base: Path) -> None:
    append(Texts(["c"], first=50), base)
    before = contents(base)
    for options in ({}, {"samples_per_shard": 7}, {"drop_duplicates": True}):
        options = {"samples_per_shard": 3, **options}
        written = append_shards(Texts(["c"], first=50), base, workers=0, **options)
        assert written.complete_before
        assert written.manifest.generation == 2
    assert contents(base) == before


def test_the_first_source_is_still_complete_after_an_append(base: Path) -> None:
    append(Texts(["c"], first=50), base)
    written = write_shards(Texts(["b", "a"]), base, samples_per_shard=4, workers=0)
    assert written.complete_before
    assert written.manifest.generation == 2


def test_the_first_source_does_not_replace_an_appended_set_with_a_lost_shard(base: Path) -> None:
    append(Texts(["c"], first=50), base)
    (base / "train-000001.tar").unlink()
    before = contents(base)
    with pytest.raises(FileNotFoundError, match=r"train-000001\.tar is missing: copy it"):
        write(Texts(["b", "a"]), base)
    assert contents(base) == before


def test_skipped_samples_of_all_generations_are_listed(base: Path) -> None:
    append(Texts(["a"], first=50, bad=52), base)
    append(Texts(["a"], first=90, bad=93), base, ignored=[Skipped("x.bin", "not a text")])
    lines = [json.loads(line) for line in (base / SKIPPED).read_text().splitlines()]
    assert [line["name"] for line in lines] == ["0052", "x.bin", "0093"]


def test_training_samples_that_equal_existing_evaluation_samples_can_be_dropped(
    base: Path,
) -> None:
    # Texts 10 to 13 are the test split of `base`.
    source = Texts(["a"], first=8, train=10, splits={})
    written = append_shards(source, base, workers=0, drop_duplicates=True)
    assert written.duplicates == 4
    texts = [text for _, text in samples(base, "train")[10:]]
    assert sorted(texts) == sorted(f"text {n}".encode() for n in (8, 9, 14, 15, 16, 17))


# ---------------------------------------------------------------- label vectors


def vectors_of(file: Path, names: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """Return the vectors of all names except those that the file contains."""
    missing = [name for name in names if name in file.read_text()]
    return np.stack([np.full(3, ord(name[0]), np.float32) for name in names]), missing


def test_new_classes_get_vectors_and_earlier_generations_keep_theirs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    folder, find = tmp_path / "set", (tmp_path / "file", vectors_of)
    first = write(Texts(["b", "a"], width=2), folder)
    second = append(WithLabelVectors(Texts(["a", "c"], first=50), *find), folder)
    third = append(Texts(["c"], first=90), folder)  # no new class requires a vector
    assert load_label_vectors(folder, first).tolist() == [[98, 98], [97, 97]]
    for manifest in (second, third):
        assert load_label_vectors(folder, manifest)[:, 2].tolist() == [98, 97, 99]
    assert second.label_vectors == third.label_vectors == "label_vectors-2.safetensors"
    assert list(damages(folder, lambda done, total: None)) == []
    (folder / "label_vectors.safetensors").write_bytes(b"x")
    (damage,) = damages(folder, lambda done, total: None)
    assert damage.kind == "label vectors"


def test_vectors_can_be_added_and_classes_without_one_are_reported(
    base: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("a")
    source = WithLabelVectors(Texts(["c"], first=50), tmp_path / "file", vectors_of)
    written = append_shards(source, base, workers=0)
    assert written.notes == ("1 classes without a vector use the mean: a",)
    assert load_label_vectors(base, written.manifest)[:, 0].tolist() == [98, 98.5, 99]
    assert Manifest.read(base, generation=1).label_vectors is None


@pytest.mark.parametrize("width", [0, 2])
def test_new_classes_of_a_set_with_vectors_require_a_file_of_vectors(
    width: int, tmp_path: Path
) -> None:
    """Vectors that a source computes from its class list differ from those of another list."""
    write(Texts(["b", "a"], width=2), tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"the new class 'c' has none: pass --vectors"):
        append(Texts(["a", "c"], first=50, width=width), tmp_path)
    assert contents(tmp_path) == before


# ---------------------------------------------------------------- refusals


def test_only_finished_shards_of_the_same_modality_can_be_extended(
    base: Path, shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="is missing: run kway shard"):
        append(Texts(["a"]), tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []
    images = shutil.copytree(shards, tmp_path / "images")
    with pytest.raises(ValueError, match="contains images, but the source contains texts"):
        append(Texts(["a"]), images)
    assert contents(images) == contents(shards)


def test_indexed_tars_cannot_be_extended(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("1.txt", b"text"), ("1.cls", b"a")])
    index_shards(tmp_path)
    with pytest.raises(ValueError, match=r"was created by kway shard index.*data\.mixture"):
        append(Texts(["a"]), tmp_path)


def test_an_unfinished_append_must_be_finished_or_deleted_before_another_one(base: Path) -> None:
    kill(append_and_stop_in, base, Texts(["c"], first=50), "train-000003.tar")
    before = contents(base)
    with pytest.raises(ValueError, match=r"append-2 contains texts\(.*or delete this one"):
        append(Texts(["d"], first=70), base)
    assert contents(base) == {k: v for k, v in before.items() if k != "append.lock"}
    shutil.rmtree(base / "append-2")
    assert append(Texts(["d"], first=70), base).class_names == ("b", "a", "d")


class Broken(Texts):
    """Raises an error at the text 55."""

    def render(self, task: int) -> Sample | Skipped:
        if task == 55:
            raise ValueError("text 55 is bad: remove it")
        return super().render(task)


def test_a_bad_sample_raises_and_changes_nothing(base: Path) -> None:
    before = contents(base)
    with pytest.raises(ValueError, match="text 55 is bad"):
        append(Broken(["c"], first=50), base)
    assert contents(base) == before


def test_a_second_append_at_the_same_time_raises(base: Path) -> None:
    errors = []

    def meanwhile(done: int, total: int) -> None:
        if done == 5:
            with pytest.raises(ValueError, match="being written by another kway shard") as error:
                append(Texts(["d"], first=70), base)
            errors.append(error)

    append(Texts(["c"], first=50), base, report=meanwhile)
    assert len(errors) == 1
    assert append(Texts(["d"], first=70), base).generation == 3


def test_an_unknown_generation_raises(base: Path) -> None:
    append(Texts(["c"], first=50), base)
    for number in (0, 3):
        with pytest.raises(ValueError, match=f"{base}: generation {number} does not exist"):
            Manifest.load(base, generation=number)


def test_verify_finds_labels_beyond_the_classes_of_their_generation(base: Path) -> None:
    changed = append(Texts(["c", "d"], first=50), base)
    assert list(damages(base, silent)) == []
    fewer = changed.earlier[0].model_copy(update={"classes": 1})
    (base / MANIFEST).write_bytes(changed.model_copy(update={"earlier": (fewer,)}).to_bytes())
    found = list(damages(base, silent))
    assert {one.kind for one in found} == {"label"}
    assert sum(one.count for one in found) == 7  # every second text of the first generation
    assert "has label 1, but there are only 1 classes" in found[0].line


@pytest.mark.parametrize("change", [{"shards": 99}, {"classes": 99}])
def test_a_manifest_with_generations_that_shrink_raises(base: Path, change: dict) -> None:
    append(Texts(["c"], first=50), base)
    stored = json.loads((base / MANIFEST).read_text())
    stored["earlier"][0].update(change)
    (base / MANIFEST).write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="a generation is not larger than the one before it"):
        Manifest.read(base)


def test_a_generation_with_label_vectors_but_no_digest_raises(base: Path) -> None:
    append(Texts(["c"], first=50), base)
    stored = json.loads((base / MANIFEST).read_text())
    stored["earlier"][0]["label_vectors"] = "label_vectors.safetensors"
    (base / MANIFEST).write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="label_vectors_sha256 must be set together"):
        Manifest.read(base)


# ---------------------------------------------------------------- loading


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A set of images, and the same set with a second generation."""
    folder = tmp_path_factory.mktemp("grown")
    for number, classes in enumerate(("ab", "bc")):
        for i in range(20):
            path = folder / f"images-{number}" / classes[i % 2] / f"{i}.png"
            write_image(path, 100 * number + i)
    write(ImageFolder(folder / "images-0", test_fraction=0.1), folder / "before")
    shutil.copytree(folder / "before", folder / "after")
    append(ImageFolder(folder / "images-1", test_fraction=0.1), folder / "after")
    return folder / "before", folder / "after"


def batches(folder: Path, generation: int, world_size: int, start: int = 0) -> list[list[bytes]]:
    """Return the contents of the samples of the global batches `start` to 8."""
    config = DataConfig(shards=folder, image=ImageConfig(size=12), generation=generation)
    found: list[list[bytes]] = [[] for _ in range(9 - start)]
    with open_split(folder, "train", manifest=load_manifest(config)) as split:
        for rank in range(world_size):
            loader = TrainLoader(
                split,
                config,
                global_batch=7,
                rank=rank,
                world_size=world_size,
                cursor=Cursor(3, samples=start * 7),
            )
            for batch in found:
                batch += [split.read(i)[0] for i in next(loader).indices.tolist()]
    return found


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_each_generation_gives_the_same_batches_at_any_world_size(
    grown: tuple[Path, Path], world_size: int
) -> None:
    before, after = grown
    first, second = batches(before, 1, 1), batches(after, 2, 1)
    assert batches(after, 1, world_size) == first
    assert batches(after, 2, world_size) == second
    assert batches(after, 1, world_size, start=4) == first[4:]
    assert batches(after, 2, world_size, start=4) == second[4:]
    for folder, found in ((before, first), (after, second)):  # 63 samples are more than an epoch
        expected = {text for _, text in samples(folder, "train")}
        assert {one for batch in found for one in batch} == expected


# ---------------------------------------------------------------- kills


def append_and_stop_in(folder: Path, source: Texts, shard: str) -> None:
    """Append until `shard` is being written, and then wait to be killed."""

    def report(done: int, total: int) -> None:
        wait_until(lambda: not any(folder.glob(f"append-2/{shard}.*.aside")))

    append(source, folder, report=report)


def append_and_stop_after(folder: Path, texts: Texts, file: Path, renames: int) -> None:
    """Append, and end the process after `renames` files were renamed into the folder."""
    source = WithLabelVectors(texts, file, vectors_of)
    replace = Path.replace

    def counted(path: Path, target: Path) -> Path:
        nonlocal renames
        if target.parent == folder:
            if renames == 0:
                os._exit(9)
            renames -= 1
        return replace(path, target)

    Path.replace = counted  # type: ignore[method-assign]
    append(source, folder)
    os._exit(0)


def kill(function: Any, folder: Path, source: Texts, where: Any) -> None:
    process = forked(function, folder, source, where)
    process.start()
    writing = f"append-2/{where}.*.aside"
    wait_until(lambda: any(folder.glob(writing)), possible=process.is_alive)
    process.kill()
    process.join(60)


@pytest.mark.parametrize("shard", ["train-000003.tar", "train-000005.tar", "test-000001.tar"])
def test_a_process_killed_while_writing_leaves_the_set_intact_and_can_be_resumed(
    shard: str, base: Path, tmp_path: Path
) -> None:
    source = Texts(["c", "a"], first=50)
    whole = shutil.copytree(base, tmp_path / "whole")
    append(source, whole)
    before = contents(base)
    kill(append_and_stop_in, base, source, shard)
    assert before.items() <= contents(base).items()
    assert list(damages(base, lambda done, total: None)) == []
    written = append_shards(source, base, samples_per_shard=3, workers=0)
    assert written.resumed == {"train-000003.tar": 0, "train-000005.tar": 2}.get(shard, 4)
    assert contents(base) == contents(whole)


def test_a_process_killed_between_renames_leaves_the_set_intact_and_can_be_resumed(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("x")
    texts = Texts(["c", "a"], first=50, train=5, splits={})
    source = WithLabelVectors(texts, tmp_path / "file", vectors_of)
    write(Texts(["b", "a"], width=3), tmp_path / "before")
    whole = shutil.copytree(tmp_path / "before", tmp_path / "whole")
    append(source, whole)
    before = contents(tmp_path / "before")
    # Two shards, each with an index, the label vectors and the manifest.
    for renames in range(7):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(renames))
        process = forked(append_and_stop_after, folder, texts, source.file, renames)
        process.start()
        process.join(60)
        if renames == 6:
            assert process.exitcode == 0
        else:
            assert process.exitcode == 9
            assert before.items() <= contents(folder).items()
            assert Manifest.load(folder).generation == 1
            assert list(damages(folder, lambda done, total: None)) == []
            written = append_shards(source, folder, samples_per_shard=3, workers=0)
            assert written.resumed in (0, 2)  # complete before, or only the vectors are missing
        assert contents(folder) == contents(whole)


def test_files_left_after_a_commit_are_deleted_by_the_next_append(base: Path) -> None:
    append(Texts(["c"], first=50), base)
    (base / "append-2").mkdir()
    (base / "append-2" / "train-000003.tar").write_bytes(b"x")
    append(Texts(["d"], first=70), base)
    assert not list(base.glob("append*"))


# ---------------------------------------------------------------- URLs and the command


def test_a_generation_can_be_read_at_a_url(base: Path, tmp_path: Path) -> None:
    append(Texts(["c"], first=50), base)
    url = f"file://{base}"
    config = DataConfig(shards=url, generation=1, cache={"folder": tmp_path / "cache"})
    manifest = load_manifest(config)
    with open_split(url, "train", cache=config.cache, manifest=manifest) as split:
        assert len(split) == 10
    assert load_manifest(config.with_generations([2])).class_names == ("b", "a", "c")


def test_a_set_that_grows_while_it_is_verified_is_reported_as_it_was(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def growing(verb: str) -> Iterator[Report]:
        def report(done: int, total: int) -> None:
            append(Texts(["c"], first=50), base)

        yield report

    monkeypatch.setattr(shard, "progress", growing)
    verified = kway_shard("verify", base)
    assert verified.exit_code == 0, verified.output
    assert "is intact: 10 train + 4 test samples, 2 classes" in verified.stdout
    assert Manifest.load(base).generation == 2


@pytest.mark.parametrize("out", ["append-9", "a/b"])
def test_shards_cannot_be_written_inside_a_set(base: Path, tmp_path: Path, out: str) -> None:
    rows = table(tmp_path / "a.csv", [(f"text {n}", "ab"[n % 2]) for n in range(40)])
    command = ["table", rows, "--text", "text", "--label", "label", "--workers", 0, "-o"]
    before = contents(base)
    rejected = kway_shard(*command, base / out)
    assert f"{base / out} is inside the shards in {base}" in str(rejected.exception)
    assert contents(base) == before
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / MANIFEST).write_text("{}")  # of a web site
    assert kway_shard(*command, tmp_path / "site" / "out").exit_code == 0


def kway_shard(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def table(path: Path, rows: Sequence[tuple[str, str]]) -> Path:
    path.write_text("\n".join(["text,label", *(f"{text},{label}" for text, label in rows)]))
    return path


def test_the_command_appends_and_shows_generations(tmp_path: Path) -> None:
    first = table(tmp_path / "a.csv", [(f"text {n}", "ab"[n % 2]) for n in range(40)])
    more = table(tmp_path / "b.csv", [(f"more {n}", "bc"[n % 2]) for n in range(40)])
    command = ["--text", "text", "--label", "label", "-o", tmp_path / "out", "--workers", 0]
    refused = kway_shard("table", more, *command, "--append")
    assert "is missing: run kway shard" in str(refused.exception)
    assert kway_shard("table", first, *command).exit_code == 0
    appended = kway_shard("table", more, *command, "--append")
    assert f"{tmp_path / 'out'}, generation 2: " in appended.stdout
    again = kway_shard("table", more, *command, "--append")
    assert "is already complete, generation 2: " in again.stdout
    shown = kway_shard("show", tmp_path / "out")
    assert "generation 2, from table: " in shown.stdout
    assert "generation 2" not in kway_shard("show", tmp_path / "out", "--generation", 1).stdout
    assert kway_shard("verify", tmp_path / "out").exit_code == 0
