"""Sets of labels: how shards store them, and how they are read, verified, mixed and indexed again.

The tests of loaders, orders, streams, sources and layouts are in the files of those.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.config import DataConfig
from data.inspection.leaks import check_leaks
from data.inspection.show import examples, texts
from data.shards.duplicates import find_duplicates
from data.shards.index import index_path
from data.shards.manifest import MANIFEST, Manifest
from data.shards.mixture import load_manifest, open_mixture
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.sources import generated
from data.tars.indexing import index_shards
from tests.data.conftest import damage_of, kway_shard, open_index, read_sets
from tests.data.foreign_tars import (
    Planted,
    planted_shards,
    png,
    read_by_webdataset,
    set_of,
    write_tar,
)
from tests.data.rank_batches import sample_labels


def write_texts(folder: Path, samples: list[tuple[Any, ...]], **options: Any) -> Manifest:
    options = {"modality": "text", "label_sets": True, "workers": 0, "test_fraction": 0} | options
    return generated.write_shards(samples, folder, **options)


def test_a_set_is_stored_in_ascending_order_and_read_with_its_sample(
    label_sets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest.load(label_sets)
    assert manifest.label_sets
    assert json.loads((label_sets / MANIFEST).read_bytes())["format_version"] == 4
    theirs = read_by_webdataset(sorted(label_sets.glob("*.tar")), monkeypatch)
    with open_split(label_sets, "train") as split:
        flat = []
        for i, sample in enumerate(theirs):
            expected = set_of(int(sample["__key__"]))
            assert sample["cls"].decode() == " ".join(map(str, expected))
            data, _, labels = split.read(i)
            assert data == sample["png"]
            assert labels.dtype == np.int64
            assert labels.tolist() == expected
            flat += expected
        assert split.labels.tolist() == flat
        assert split.offsets[-1] == len(flat) == sum(s.labels for s in manifest.shards)
        assert split.class_counts().tolist() == np.bincount(flat).tolist()
        samples = np.random.default_rng(0).integers(0, len(split), 50)
        labels, contents = split.read_many(samples)
        assert [one.tolist() for one in labels] == sample_labels(split, samples)
        assert list(contents) == [split.read(i)[0] for i in samples.tolist()]
        assert split.read_many(np.empty(0, np.int64))[0] == []
        for label in range(3):
            rows = split.samples_of_class(label)
            assert rows.tolist() == [
                i for i, one in enumerate(theirs) if str(label) in one["cls"].decode()
            ]


def test_shards_of_one_label_are_written_as_before(copy: Path) -> None:
    content = json.loads((copy / MANIFEST).read_bytes())
    assert content["format_version"] == 1
    assert "labels" not in content["shards"][0]
    assert b"set_sizes" not in index_path(copy / "train-000000.tar").read_bytes()


def test_repeated_and_unsorted_labels_of_a_sample_become_a_set(tmp_path: Path) -> None:
    samples = [(png(0), "png", (2, 0, 2)), (png(1), "png", ())]
    write_shards(Planted(samples, 3), tmp_path / "out", workers=0)
    with open_split(tmp_path / "out", "train") as split:
        assert sorted(sample_labels(split, range(2))) == [[], [0, 2]]
    write_shards(Planted([(png(0), "png", ())] * 2, 3), tmp_path / "empty", workers=0)
    with open_split(tmp_path / "empty", "train") as split:
        assert split.label_sets
        assert sample_labels(split, range(2)) == [[], []]


def test_a_source_must_not_mix_sets_and_single_labels(tmp_path: Path) -> None:
    samples = [(png(0), "png", 1), (png(1), "png", (1,))]
    with pytest.raises(ValueError, match="either sets of labels or one label"):
        write_shards(Planted(samples, 3), tmp_path / "out", workers=0)


def test_an_index_of_sets_has_4_more_bytes_per_label(label_sets: Path) -> None:
    index = open_index(label_sets / "train-000000.tar")
    size = index_path(label_sets / "train-000000.tar").stat().st_size
    assert size < 30 * 10 + 4 * len(index.labels) + 1000
    with pytest.raises(ValueError, match="labels do not fit"):
        type(index.info).model_validate(index.info.model_dump() | {"labels": 10**9})


def test_verify_finds_a_set_that_differs_and_labels_out_of_range(tmp_path: Path) -> None:
    shards = planted_shards(tmp_path / "out", {}, sets=True)
    assert damage_of(shards) == []
    shard = shards / "train-000000.tar"
    index = open_index(shard)
    row = next(row for row in range(10) if index.labels_of(row) == [0, 1])
    content = bytearray(shard.read_bytes())
    content[int(index.blocks[row, 1]) * 512] = ord("2")
    shard.write_bytes(content)
    (_, of_sample) = damage_of(shards)
    assert "cls differs from the label in the index, 0 1" in of_sample.line
    manifest = Manifest.read(shards)
    fewer = manifest.model_copy(update={"classes": manifest.classes.of_names(["a", "b"])})
    (shards / MANIFEST).write_bytes(fewer.to_bytes())
    assert any("has label 2, but there are only 2 classes" in one.line for one in damage_of(shards))


def test_sets_are_united_by_name_and_sorted_again_in_a_mixture(tmp_path: Path, texts: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    write_texts(folders[0], [("t0", ["b", "d"]), ("t1", []), ("t2", ["d"])])
    write_texts(folders[1], [("u0", ["a", "b", "c"]), ("u1", ["d", "a"]), ("u2", [])])
    config = DataConfig(
        shards=folders[0],
        text={"tokenizer": str(texts / "tokenizer")},
        mixture=[{"shards": folder} for folder in folders],
    )
    manifest = load_manifest(config)
    assert manifest.class_names == ("b", "d", "a", "c")
    with open_mixture(config, manifest) as mixture:
        found = {mixture.text(i)[0]: mixture.text(i)[1].tolist() for i in range(6)}
        assert found == {
            "t0": [0, 1], "t1": [], "t2": [1], "u0": [0, 2, 3], "u1": [1, 2], "u2": [],
        }  # fmt: skip
        (_, own) = mixture.labels_of_parts()
        assert sorted(own[0].tolist()) == [0, 0, 1, 2, 3]
        assert own[1].tolist() == (mixture.offsets[3:] - mixture.offsets[3]).tolist()
    single = config.model_copy(update={"shards": texts / "shards"})
    with pytest.raises(ValueError, match=r"one has a set of labels per sample, but .* has one lab"):
        load_manifest(single)


def test_tars_with_lists_of_labels_are_indexed(tmp_path: Path) -> None:
    members = []
    for number, label in enumerate(('["dog", "cat"]', "[]", '"dog"', '["cat", "cat"]')):
        members += [
            (f"{number}.txt", b"t%d" % number),
            (f"{number}.json", b'{"of": %s}' % label.encode()),
        ]
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(ValueError, match=r"'of' of its \.json is a list: pass --label-sets"):
        index_shards(tmp_path, label_field="of")
    done = kway_shard("index", tmp_path, "--label-field", "of", "--label-sets")
    assert done.exit_code == 0, done.output
    assert read_sets(tmp_path) == {"t0": ["cat", "dog"], "t1": [], "t2": ["dog"], "t3": ["cat"]}
    assert damage_of(tmp_path) == []
    (tmp_path / "names.txt").write_text("dog\ncat\n")
    index_shards(tmp_path, label_field="of", label_sets=True, classes=tmp_path / "names.txt")
    assert read_sets(tmp_path)["t0"] == ["dog", "cat"]
    write_tar(tmp_path / "a.tar", [*members, ("4.txt", b"x"), ("4.json", b'{"of": ["dog", " "]}')])
    with pytest.raises(ValueError, match=r"a\.tar: 4: the label is empty"):
        index_shards(tmp_path, label_field="of", label_sets=True)


def test_lost_files_of_a_folder_with_sets_are_written_again_by_index(
    label_sets: Path, tmp_path: Path
) -> None:
    names = tmp_path / "names.txt"
    names.write_text("\n".join(Manifest.load(label_sets).class_names))
    for tar in label_sets.glob("*.tar"):
        (tmp_path / tar.name).write_bytes(tar.read_bytes())
    index_shards(tmp_path, classes=names, label_sets=True)
    for tar in label_sets.glob("*.tar"):
        assert index_path(tmp_path / tar.name).read_bytes() == index_path(tar).read_bytes()


def test_show_check_and_duplicates_read_sets(tmp_path: Path) -> None:
    words = [f"text {number} of some words" for number in range(100)]
    samples = [
        (
            word + " ※" * (number % 3 == 0),
            [name for name, step in (("a", 3), ("b", 2)) if number % step == 0],
        )
        for number, word in enumerate(words)
    ]
    held_out = [("text 1 of some words", ["b"], "val"), ("text 2 of some words", ["b"], "val")]
    write_texts(tmp_path / "out", [*((*sample, "train") for sample in samples), *held_out])
    with open_split(tmp_path / "out", "train") as split:
        assert len(set(examples(split, 6))) == len(examples(split, 6))
        assert {"a, b", "b"} & {name for name, _ in texts(split, 6)}
    shown = kway_shard("show", tmp_path / "out").stdout
    assert "100 (33 without a class)" in " ".join(shown.split())
    (leak, *_) = check_leaks(tmp_path / "out")
    assert (leak.char, leak.class_name, leak.suspect is not None) == ("※", "a", True)
    found = {one.split: one for one in find_duplicates(tmp_path / "out")}
    assert (found["test"].in_training, found["test"].other_class) == (2, 1)


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        ([("x", "a"), ("y", ["b"])], {}, "sample 0 has the label 'a': with label_sets=True"),
        ([("x", ["a"]), ("y", "b")], {"label_sets": False}, r"sample 0 has the label \['a'\]"),
        ([("x", ["a"], None, "up"), ("y", ["b"])], {}, "sample 0 .* no hierarchy"),
        ([("x", ["a"]), ("y", [3, 7])], {}, r"sample 1 has the label \[3, 7\]: .* list of names"),
        ([("x", None), ("y", ["b"])], {}, "sample 0 has the label None"),
        ([(b"x", ["a"]), (b"x", ["a", "b"])], {"modality": "image"}, "the labels 'a' and 'a, b'"),
    ],
)
def test_invalid_sets_of_a_program_raise(
    tmp_path: Path, samples: list[tuple], options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_texts(tmp_path / "out", samples, **options)
    assert list(tmp_path.iterdir()) == []
