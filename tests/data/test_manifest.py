"""Errors raised for a damaged folder of shards."""

import gc
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file

from data.inspection.verify import damages
from data.shards.index import FORMAT, _crc32, index_path, open_index
from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import Manifest
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.sources import EmojiNames
from tests.faults.sitecustomize import error


@pytest.fixture
def copy(shards: Path, tmp_path: Path) -> Path:
    for path in shards.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(folder: Path, **changes: object) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | changes))


def replace(folder: Path, **changes: object) -> None:
    """Change the manifest as `edit` does, but keep its checksum valid."""
    manifest = Manifest.read(folder)
    changed = Manifest.model_validate(manifest.model_dump() | changes)
    (folder / "manifest.json").write_bytes(changed.to_bytes())


def message(folder: Path, kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as error:
        open_split(folder, "train")
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    return str(error.value)


def test_a_manifest_survives_a_round_trip(shards: Path) -> None:
    manifest = Manifest.load(shards)
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest
    assert manifest.splits == ("train", "test")
    assert [c.name for c in manifest.classes] == ["apple", "birne", "crème", "date"]


def test_a_missing_manifest_raises(copy: Path) -> None:
    (copy / "manifest.json").unlink()
    assert "manifest.json is missing: run kway shard" in message(copy, FileNotFoundError)


def test_a_damaged_manifest_raises(copy: Path) -> None:
    content = (copy / "manifest.json").read_bytes()
    (copy / "manifest.json").write_bytes(content[: len(content) // 2])
    assert "is damaged" in message(copy)


def test_a_manifest_in_a_newer_format_raises(copy: Path) -> None:
    edit(copy, format_version=3, news="unknown to us")
    assert "has format version 3, but this version of kway reads versions up to 2" in message(copy)


def test_a_manifest_with_a_path_outside_its_folder_raises(copy: Path) -> None:
    shards = json.loads((copy / "manifest.json").read_text())["shards"]
    shards[0]["file"] = "../train-000000.tar"
    edit(copy, shards=shards)
    assert "shards.0.file" in message(copy)


def test_a_class_listed_twice_raises(copy: Path) -> None:
    edit(copy, classes=[{"name": "apple"}] * 4)
    assert "class 'apple' is listed twice" in message(copy)


def test_a_manifest_without_shards_raises(copy: Path) -> None:
    edit(copy, shards=[])
    assert "(shards: " in message(copy)


def test_an_edited_class_list_raises(copy: Path) -> None:
    classes = json.loads((copy / "manifest.json").read_text())["classes"]
    edit(copy, classes=[*classes, {"name": "elder"}])
    assert "its checksum does not match" in message(copy)


def test_an_index_with_an_edited_label_raises(copy: Path) -> None:
    path = index_path(copy / "train-000000.tar")
    content = bytearray(path.read_bytes())
    with safe_open(path, framework="numpy") as file:
        labels = file.get_tensor("labels").tobytes()
    content[content.index(labels)] ^= 1  # another valid class
    path.write_bytes(content)
    assert "its checksum does not match" in message(copy)


@pytest.mark.parametrize("member", [0, 1])
@pytest.mark.parametrize(("name", "wrong"), [("extension", 9), ("places", 0)])
def test_an_out_of_range_index_entry_with_a_valid_checksum_raises(
    copy: Path, name: str, wrong: int, member: int
) -> None:
    shard = copy / "train-000000.tar"
    index, tensors = open_index(shard), load_file(index_path(shard))
    tensors[name].reshape(2, -1)[member, 3] = wrong
    info = index.info.model_copy(update={"index_crc32": _crc32(index.extensions, tensors)})
    about = {"format": FORMAT, "shard": info.model_dump(), "extensions": index.extensions}
    save_file(tensors, index_path(shard), metadata={"kway": json.dumps(about)})
    replace(copy, shards=[info, *Manifest.read(copy).shards[1:]])
    assert "an entry is out of range" in message(copy)


@pytest.mark.parametrize("other", [FORMAT + 1, None])
def test_an_index_in_another_format_raises(copy: Path, other: int | None) -> None:
    path = index_path(copy / "train-000000.tar")
    with safe_open(path, framework="numpy") as file:
        about = json.loads(file.metadata()["kway"])
    about["format"] = other
    save_file(load_file(path), path, metadata={"kway": json.dumps(about)})
    assert f"has format {other}, but this version of kway reads {FORMAT}" in message(copy)


def test_fewer_classes_than_labels_raise(copy: Path) -> None:
    replace(copy, classes=[{"name": "apple"}, {"name": "birne"}, {"name": "crème"}])
    assert "has label 3, but the manifest has 3 classes" in message(copy)


def test_a_missing_shard_raises(copy: Path) -> None:
    (copy / "train-000001.tar").unlink()
    assert "train-000001.tar is missing" in message(copy, FileNotFoundError)


def test_a_truncated_shard_raises(copy: Path) -> None:
    tar = copy / "train-000001.tar"
    tar.write_bytes(tar.read_bytes()[:-700])
    assert "train-000001.tar has " in message(copy)


def test_a_missing_index_raises(copy: Path) -> None:
    index_path(copy / "train-000000.tar").unlink()
    assert "train-000000.index.safetensors is missing" in message(copy, FileNotFoundError)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_index_raises(copy: Path, keep: int) -> None:
    index = index_path(copy / "train-000000.tar")
    index.write_bytes(index.read_bytes()[:keep])
    assert "train-000000.index.safetensors is damaged" in message(copy)


def test_the_index_of_another_shard_raises(copy: Path) -> None:
    index = index_path(copy / "train-000000.tar")
    index.write_bytes(index_path(copy / "train-000001.tar").read_bytes())
    assert "does not match the manifest" in message(copy)


def test_an_unknown_split_raises_an_error_that_lists_the_existing_splits(shards: Path) -> None:
    with pytest.raises(ValueError, match="no split 'val': choose from train, test"):
        open_split(shards, "val")


def test_label_vectors_that_do_not_match_the_class_list_raise(copy: Path) -> None:
    with pytest.raises(ValueError, match="does not provide label vectors"):
        load_label_vectors(copy, Manifest.load(copy))
    path = copy / "label_vectors.safetensors"
    for wrong, message in (
        (save({"vectors": np.zeros((3, 2), np.float32)}), r"has shape \[3, 2\]"),
        (save({"vectors": np.full((4, 2), np.nan, np.float32)}), "not finite"),
        (save({"others": np.zeros((4, 2), np.float32)}), "does not contain vectors"),
        (b"no safetensors", "does not contain vectors"),
    ):
        path.write_bytes(wrong)
        digest = hashlib.sha256(wrong).hexdigest()
        replace(copy, label_vectors=path.name, label_vectors_sha256=digest)
        with pytest.raises(ValueError, match=message):
            load_label_vectors(copy, Manifest.load(copy))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{path} is missing: copy it or run kway shard"):
        load_label_vectors(copy, Manifest.load(copy))


def test_label_vectors_without_their_digest_raise(copy: Path) -> None:
    edit(copy, label_vectors="label_vectors.safetensors")
    assert "must be set together" in message(copy)


def test_damaged_label_vectors_raise_and_the_writer_replaces_them(tmp_path: Path) -> None:
    source = EmojiNames(languages=("en",), test_languages=())
    manifest = write_shards(source, tmp_path, workers=0).manifest
    path = tmp_path / "label_vectors.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with pytest.raises(ValueError, match=f"{path} does not match the manifest"):
        load_label_vectors(tmp_path, manifest)
    (damage,) = damages(tmp_path, lambda done, total: None, workers=0)
    assert damage.kind == "label vectors"
    assert not write_shards(source, tmp_path, workers=0).complete_before
    assert path.read_bytes() == whole
    assert write_shards(source, tmp_path, workers=0).complete_before


def test_reading_a_manifest_disables_the_garbage_collector(copy: Path) -> None:
    phases: list[str] = []

    def record(phase: str, about: dict[str, int]) -> None:
        phases.append(phase)

    classes = [{"name": f"class {i}"} for i in range(5_000)]
    replace(copy, classes=classes)
    gc.collect()
    gc.callbacks.append(record)
    try:
        Manifest.read(copy)
        # New objects may be scanned once afterwards.
        assert phases.count("start") <= 1
        (copy / "manifest.json").write_text("{")
        with pytest.raises(ValueError, match="is damaged"):
            Manifest.read(copy)
    finally:
        gc.callbacks.remove(record)
    assert gc.isenabled()


@pytest.mark.parametrize(
    "name", ["a\nb.tar", "a\x1b[31m.tar", "a\x85.tar", "a\u2028.tar", "a/b", "a\\b"]
)
def test_a_file_or_split_with_control_characters_raises(copy: Path, name: str) -> None:
    shards = json.loads((copy / "manifest.json").read_text())["shards"]
    edit(copy, shards=[shards[0] | {"file": name}])
    assert "shards.0.file" in message(copy)
    edit(copy, shards=[shards[0] | {"split": name}])
    assert "shards.0.split" in message(copy)


def test_split_names_with_other_characters_are_read(copy: Path) -> None:
    manifest = Manifest.read(copy)
    for name in ("a b", "größe", "x:y", ".x"):
        (shard, *others) = manifest.shards
        renamed = (shard.model_copy(update={"split": name}), *others)
        changed = manifest.model_copy(update={"shards": renamed})
        (copy / "manifest.json").write_bytes(changed.to_bytes())
        assert Manifest.read(copy).splits[0] == name


def test_more_samples_than_fit_in_the_shard_raise(copy: Path) -> None:
    shards = json.loads((copy / "manifest.json").read_text())["shards"]
    edit(copy, shards=[shards[0] | {"samples": 10**12}])
    assert "1000000000000 samples do not fit" in message(copy)


def test_an_empty_class_list_raises(copy: Path) -> None:
    edit(copy, classes=[])
    assert "(classes: " in message(copy)


def test_a_url_passed_as_a_path_raises(tmp_path: Path) -> None:
    for read in (Manifest.read, Manifest.load):
        with pytest.raises(ValueError, match="is a URL, but only local folders"):
            read(Path("s3://bucket/set"))


def test_reading_the_manifest_is_retried_after_a_transient_error(
    shards: Path, injected: Callable[..., None]
) -> None:
    injected("stat", "manifest.json", error("ESTALE"), times=2)
    Manifest.read(shards)
