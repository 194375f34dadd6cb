"""Tars that kway did not write get an index and a manifest, and no sample is lost silently."""

import gzip
import json
import os
import tarfile
from pathlib import Path

import pytest

from data.shards.manifest import Manifest
from data.shards.split import open_split
from data.skipped import SKIPPED
from data.tars.indexing import Indexed, index_shards
from tests.data.conftest import damage_of, kway_shard, overwrite
from tests.data.foreign_tars import images, planted_shards, png, read_by_webdataset, write_tar


def keys(folder: Path, split: str = "train") -> list[str]:
    with open_split(folder, split) as opened:
        return [opened.key(i) for i in range(len(opened))]


FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


@pytest.mark.parametrize("form", FORMATS)
def test_every_header_format_gives_bytes_keys_and_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    members, expected = [], []
    for number in range(8):
        folder = "a.b/" + "long/" * (40 if number % 2 and form != "ustar" else 3)
        key = f"{folder}ü{number}" if form != "ustar" else f"{folder}{number}"
        data = png(number)
        members += [
            (f"{key}.caption.txt", "größer".encode()),
            (f"{key}.PNG", data),
            (f"{key}.seg.png", b"not this one"),
            (f"{key}.cls", f" {number % 3}\n".encode()),
        ]
        expected.append((key, data, "PNG", number % 3))
    write_tar(tmp_path / "part.tar", members, FORMATS[form])
    indexed = index_shards(tmp_path)
    assert indexed.manifest.modality == "image"
    assert indexed.manifest.class_names == ("0", "1", "2")
    with open_split(tmp_path, "train") as split:
        found = [(split.key(i), *split.read(i)) for i in range(len(split))]
    assert found == expected
    assert damage_of(tmp_path, decode=True) == []
    read = read_by_webdataset([tmp_path / "part.tar"], monkeypatch)
    assert [sample["__key__"] for sample in read] == [key for key, *_ in expected]


@pytest.mark.parametrize("wipe", [b"\xff" * 512, bytes(512)])
def test_a_bad_header_costs_one_sample_where_webdataset_loses_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wipe: bytes
) -> None:
    tar = tmp_path / "part.tar"
    write_tar(tar, images(0, 100))
    with tarfile.open(tar) as opened:
        offset = opened.getmember("00011.png").offset
    overwrite(tar, offset, wipe)
    assert len(read_by_webdataset([tar], monkeypatch)) <= 12
    with pytest.raises(ValueError, match="has 2 problems") as error:
        index_shards(tmp_path)
    assert "00011: no .jpg or " in str(error.value)
    assert "part.tar: at byte" in str(error.value)
    assert sorted(os.listdir(tmp_path)) == ["part.tar"]
    indexed = index_shards(tmp_path, skip_bad=True)
    assert len(indexed.problems) == 2
    assert keys(tmp_path) == [f"{n:05d}" for n in range(100) if n != 11]
    assert damage_of(tmp_path, decode=True) == []


@pytest.mark.parametrize("inside", [True, False])
def test_a_skipped_truncation_is_recorded_and_verify_reports_it_without_failing(
    tmp_path: Path, inside: bool
) -> None:
    tar = tmp_path / "part.tar"
    write_tar(tar, images(0, 100))
    with tarfile.open(tar) as opened:
        member = opened.getmember("00030.png")
    end = member.offset_data + 10 if inside else member.offset
    tar.write_bytes(tar.read_bytes()[:end])
    what = "00030.png is truncated" if inside else "the zero blocks at the end are missing"
    with pytest.raises(ValueError, match=what):
        index_shards(tmp_path)
    done = kway_shard("index", tmp_path, "--skip-bad")
    assert done.exit_code == 0, done.output
    assert "30 train samples" in done.stdout
    assert Manifest.load(tmp_path).incomplete.keys() == {"part.tar"}
    checked = kway_shard("verify", tmp_path)
    assert checked.exit_code == 0, checked.output
    assert f"part.tar: {what}" in checked.stderr
    assert "is intact" not in checked.stdout


@pytest.mark.parametrize(("zeros", "is_closed"), [(1000, False), (1300, True)])
def test_a_tar_ends_with_two_zero_blocks_and_any_number_of_further_zeros(
    tmp_path: Path, zeros: int, is_closed: bool
) -> None:
    tar = tmp_path / "part.tar"
    write_tar(tar, images(0, 3))
    with tarfile.open(tar) as opened:
        last = opened.getmembers()[-1]
    tar.write_bytes(tar.read_bytes()[: last.offset_data + 512] + bytes(zeros))
    indexed = index_shards(tmp_path, skip_bad=True)
    assert (indexed.problems == ()) == is_closed
    assert (indexed.manifest.incomplete == {}) == is_closed


def test_concatenated_tars_are_read_completely_and_reported(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", images(0, 3))
    write_tar(tmp_path / "b.tar", images(3, 3))
    joined = (tmp_path / "a.tar").read_bytes() + (tmp_path / "b.tar").read_bytes()
    (tmp_path / "b.tar").unlink()
    (tmp_path / "a.tar").write_bytes(joined)
    with pytest.raises(ValueError, match="without a valid header: damage, or concatenated tars"):
        index_shards(tmp_path)
    index_shards(tmp_path, skip_bad=True)
    assert keys(tmp_path) == [f"{n:05d}" for n in range(6)]


def test_a_tar_without_a_complete_sample_does_not_affect_others(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", images(0, 3))
    write_tar(tmp_path / "b.tar", [])
    write_tar(tmp_path / "c.tar", [("1.png", png(1))])
    with pytest.raises(ValueError, match=r"b\.tar: contains no sample; .*c\.tar: 1: no \.cls or"):
        index_shards(tmp_path)
    assert len(index_shards(tmp_path, skip_bad=True).manifest.shards) == 1
    (tmp_path / "a.tar").unlink()
    with pytest.raises(ValueError, match="does not contain a complete sample"):
        index_shards(tmp_path, skip_bad=True)


def members_of(labels: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Return an image and one label member, (extension, bytes), for each sample."""
    members = []
    for number, (extension, data) in enumerate(labels):
        members += [(f"{number}.png", png(number)), (f"{number}.{extension}", data)]
    return members


JSON = [
    ("json", json.dumps({"meta": {"name": name}, "label": 3}).encode()) for name in ("cat", "ant")
]


@pytest.mark.parametrize(
    ("labels", "options", "found", "classes"),
    [
        ([("cls", "crème".encode()), ("cls", b"ant")], {}, ["crème", "ant"], ("ant", "crème")),
        (JSON, {}, ["3", "3"], ("3",)),
        (JSON, {"label_field": "meta.name"}, ["cat", "ant"], ("ant", "cat")),
        ([("species", b"cat")], {"label": "species"}, ["cat"], ("cat",)),
        (
            [("cls", b"2"), ("cls", b"cat"), ("json", b'{"label": 0}')],
            {"classes": "zebra\ncat\ndog\n"},
            ["dog", "cat", "zebra"],
            ("zebra", "cat", "dog"),
        ),
    ],
    ids=["names", "json", "nested", "member", "file"],
)
def test_labels_are_texts_json_fields_or_lines_of_the_class_file(
    tmp_path: Path, labels: list, options: dict, found: list[str], classes: tuple[str, ...]
) -> None:
    write_tar(tmp_path / "part.tar", members_of(labels))
    if "classes" in options:
        (tmp_path / "names").write_text(options["classes"])
        options = {"classes": tmp_path / "names"}
    assert index_shards(tmp_path, **options).manifest.class_names == classes
    assert damage_of(tmp_path, decode=True) == []
    with open_split(tmp_path, "train") as split:
        assert [split.classes[label].name for label in split.labels] == found


def test_gaps_in_the_numbers_of_the_tars_are_named(tmp_path: Path) -> None:
    for number in (0, 1, 3, 7):
        write_tar(tmp_path / f"train-{number:04d}.tar", images(3 * number, 3))
    write_tar(tmp_path / "test.tar", images(30, 3))
    note = (
        "gaps in the numbers of the tars: train-0002.tar, train-0004.tar to train-0006.tar missing"
    )
    assert index_shards(tmp_path).notes == (note,)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (("cls", b"3"), "label 3 is out of range: there are 3 classes"),
        (("cls", b"cow"), "label 'cow' is not one of the 3 class names"),
        (("cls", b"\xff"), "its .cls is not UTF-8"),
        (("cls", b" "), "the label is empty"),
        (("json", b'{"label": [1]}'), "field 'label' of its .json is a list: pass --label-sets to"),
        (("json", b'{"other": 1}'), "field 'label' is missing from its .json"),
        (("json", b"[" * 100_000), "its .json is damaged ("),
        (("txt", b"a caption"), "no .cls or .json, only .png, .txt"),
    ],
)
def test_the_error_for_an_invalid_label_names_its_key(
    tmp_path: Path, label: tuple[str, bytes], message: str
) -> None:
    (tmp_path / "names").write_text("zebra\ncat\ndog\n")
    write_tar(tmp_path / "part.tar", members_of([("cls", b"1"), label, ("cls", b"2")]))
    with pytest.raises(ValueError, match="pass --skip-bad") as error:
        index_shards(tmp_path, classes=tmp_path / "names")
    assert f"part.tar: 1: {message}" in str(error.value)
    indexed = index_shards(tmp_path, classes=tmp_path / "names", skip_bad=True)
    assert len(indexed.problems) == 1
    assert keys(tmp_path) == ["0", "2"]


def test_the_sample_can_be_selected_among_several_members(tmp_path: Path) -> None:
    members = [("1.left.png", png(1)), ("1.png", png(2)), ("1.txt", b"hello"), ("1.cls", b"0")]
    write_tar(tmp_path / "part.tar", members)
    for sample, modality, data in (
        (None, "image", png(2)),
        ("left.png", "image", png(1)),
        ("txt", "text", b"hello"),
    ):
        assert index_shards(tmp_path, sample=sample).manifest.modality == modality
        with open_split(tmp_path, "train") as split:
            assert split.read(0)[0] == data
    with pytest.raises(ValueError, match=r"no \.right\.png, only"):
        index_shards(tmp_path, sample=".right.png")


@pytest.mark.parametrize("name", ["part.tgz", "part.tar"])
def test_a_compressed_tar_raises_an_error_that_states_the_fix(tmp_path: Path, name: str) -> None:
    write_tar(tmp_path / "plain", images(0, 3))
    (tmp_path / name).write_bytes(gzip.compress((tmp_path / "plain").read_bytes()))
    with pytest.raises(ValueError, match=rf"{name} is compressed.*gunzip"):
        index_shards(tmp_path)


def by_split(indexed: Indexed) -> dict[str, list[str]]:
    manifest = indexed.manifest
    return {name: [s.file for s in manifest.of_split(name)] for name in manifest.splits}


def test_tar_names_determine_the_split(tmp_path: Path) -> None:
    for number, name in enumerate(("set-val-0.tar", "set_train_0.tar", "set_train_1.tar")):
        write_tar(tmp_path / name, images(3 * number, 3))
    indexed = index_shards(tmp_path)
    trained = ["set_train_0.tar", "set_train_1.tar"]
    assert by_split(indexed) == {"train": trained, "test": ["set-val-0.tar"]}
    write_tar(tmp_path / "set-test.tar", images(20, 3))
    assert by_split(index_shards(tmp_path)) == {
        "train": trained,
        "test": ["set-test.tar"],
        "validation": ["set-val-0.tar"],
    }


def test_globs_determine_the_split_and_unmatched_tars_are_reported(tmp_path: Path) -> None:
    for number in range(4):
        write_tar(tmp_path / f"{number}.tar", images(3 * number, 3))
    done = kway_shard("index", tmp_path, "--split", "train=[01].tar", "--split", "test=2.*")
    assert done.exit_code == 0, done.output
    assert "6 train + 3 test samples" in done.stdout
    assert "not indexed, because no --split matches: 3.tar" in done.stderr
    wrong = kway_shard("index", tmp_path, "--split", "train=none*")
    assert "--split train=none* does not match" in str(wrong.exception)
    assert "pass NAME=GLOB" in str(kway_shard("index", tmp_path, "--split", "x").exception)


def test_tars_in_subfolders_are_indexed_through_links(tmp_path: Path) -> None:
    write_tar(tmp_path / "in" / "train" / "0.tar", images(0, 6))
    write_tar(tmp_path / "in" / "val" / "0.tar", images(6, 3))
    with pytest.raises(ValueError, match=r"0\.tar is in a subfolder.*\(ln -s\)"):
        index_shards(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    for split in ("train", "val"):
        (out / f"{split}-0.tar").symlink_to(tmp_path / "in" / split / "0.tar")
    assert by_split(index_shards(out)) == {"train": ["train-0.tar"], "test": ["val-0.tar"]}
    assert damage_of(out, decode=True) == []
    assert not list((tmp_path / "in").rglob("*.safetensors"))


def test_shards_and_folders_without_tars_are_not_indexed(tmp_path: Path) -> None:
    own = planted_shards(tmp_path / "own", {})
    with pytest.raises(ValueError, match="contains shards of planted"):
        index_shards(own)
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"contains no \.tar"):
        index_shards(tmp_path / "other")


def test_indexing_does_not_replace_a_file_that_it_did_not_write(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", images(0, 3))
    (tmp_path / SKIPPED).write_text("mine")
    with pytest.raises(ValueError, match=r"skipped\.jsonl would be replaced"):
        index_shards(tmp_path)
    assert (tmp_path / SKIPPED).read_text() == "mine"


def test_skipped_jsonl_lists_every_problem(tmp_path: Path) -> None:
    bad = {f"{number}.cls" for number in range(5, 30)}
    members = members_of([("cls", b"cat")] * 30)
    others = [("README", b"x"), ("__meta__", b"x"), ("4.cls", b"7")]
    some = [member for member in members if member[0] not in bad]
    write_tar(tmp_path / "0.tar", [*some, *others])
    done = kway_shard("index", tmp_path, "--skip-bad")
    assert done.stderr.count("no .cls or .json") == 10
    assert "names lack a key or an extension, as webdataset does: 2" in done.stderr
    skipped = map(json.loads, (tmp_path / SKIPPED).read_text().splitlines())
    names = [one["name"].removeprefix(f"{tmp_path}/0.tar: ") for one in skipped]
    assert names == [*map(str, range(5, 30)), "4"]
    write_tar(tmp_path / "0.tar", members)
    index_shards(tmp_path)
    assert not (tmp_path / SKIPPED).exists()


@pytest.mark.parametrize("name", ["a\\b.tar", "\x1b[31m.tar"])
def test_a_tar_name_that_is_invalid_in_a_manifest_raises(tmp_path: Path, name: str) -> None:
    write_tar(tmp_path / name, [("0.txt", b"x"), ("0.cls", b"0")])
    with pytest.raises(ValueError, match="a manifest cannot contain this file name") as caught:
        index_shards(tmp_path)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
