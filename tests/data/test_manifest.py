"""What a damaged folder of shards says about itself."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from data import Manifest, load_label_vectors, open_split
from data.shards.index import FORMAT, _crc32, index_path, open_index


@pytest.fixture
def copy(shards: Path, tmp_path: Path) -> Path:
    for path in shards.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(folder: Path, **changes: object) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | changes))


def replace(folder: Path, **changes: object) -> None:
    """As `edit`, by whoever can make a checksum too."""
    whole = Manifest.read(folder)
    changed = Manifest.model_validate(whole.model_dump() | changes)
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


def test_no_manifest(copy: Path) -> None:
    (copy / "manifest.json").unlink()
    assert "no manifest.json: make the shards with kway shard" in message(copy, FileNotFoundError)


def test_damaged_manifest(copy: Path) -> None:
    content = (copy / "manifest.json").read_bytes()
    (copy / "manifest.json").write_bytes(content[: len(content) // 2])
    assert "is damaged" in message(copy)


def test_manifest_of_a_newer_format(copy: Path) -> None:
    edit(copy, format_version=2, news="unknown to us")
    assert "has format version 2 and this kway reads up to 1: install" in message(copy)


def test_manifest_that_reaches_outside_its_folder(copy: Path) -> None:
    shards = json.loads((copy / "manifest.json").read_text())["shards"]
    shards[0]["file"] = "../train-000000.tar"
    edit(copy, shards=shards)
    assert "shards.0.file" in message(copy)


def test_class_listed_twice(copy: Path) -> None:
    edit(copy, classes=[{"name": "apple"}] * 4)
    assert "class 'apple' is listed twice" in message(copy)


def test_a_manifest_without_shards(copy: Path) -> None:
    edit(copy, shards=[])
    assert "(shards: " in message(copy)


def test_an_edited_class_list(copy: Path) -> None:
    classes = json.loads((copy / "manifest.json").read_text())["classes"]
    edit(copy, classes=[*classes, {"name": "elder"}])
    assert "its checksum does not hold" in message(copy)


def test_an_index_with_another_label(copy: Path) -> None:
    path = index_path(copy / "train-000000.tar")
    content = bytearray(path.read_bytes())
    with safe_open(path, framework="numpy") as file:
        labels = file.get_tensor("labels").tobytes()
    content[content.index(labels)] ^= 1  # a class that there is, too
    path.write_bytes(content)
    assert "its checksum does not hold" in message(copy)


@pytest.mark.parametrize("member", [0, 1])
@pytest.mark.parametrize(("name", "wrong"), [("extension", 9), ("places", 0)])
def test_an_index_that_points_nowhere_and_was_made_so(
    copy: Path, name: str, wrong: int, member: int
) -> None:
    shard = copy / "train-000000.tar"
    index, tensors = open_index(shard), load_file(index_path(shard))
    tensors[name].reshape(2, -1)[member, 3] = wrong
    info = index.info.model_copy(update={"index_crc32": _crc32(index.extensions, tensors)})
    about = {"format": FORMAT, "shard": info.model_dump(), "extensions": index.extensions}
    save_file(tensors, index_path(shard), metadata={"kway": json.dumps(about)})
    replace(copy, shards=[info, *Manifest.read(copy).shards[1:]])
    assert "an entry points nowhere" in message(copy)


@pytest.mark.parametrize("other", [FORMAT + 1, None])
def test_an_index_of_another_format(copy: Path, other: int | None) -> None:
    path = index_path(copy / "train-000000.tar")
    with safe_open(path, framework="numpy") as file:
        about = json.loads(file.metadata()["kway"])
    about["format"] = other
    save_file(load_file(path), path, metadata={"kway": json.dumps(about)})
    assert f"{path} has format {other} and this kway reads {FORMAT}: make it again" in message(copy)


def test_fewer_classes_than_labels(copy: Path) -> None:
    replace(copy, classes=[{"name": "apple"}, {"name": "birne"}, {"name": "crème"}])
    assert "has label 3 and the manifest lists 3 classes" in message(copy)


def test_missing_shard(copy: Path) -> None:
    (copy / "train-000001.tar").unlink()
    assert "train-000001.tar is missing" in message(copy, FileNotFoundError)


def test_truncated_shard(copy: Path) -> None:
    tar = copy / "train-000001.tar"
    tar.write_bytes(tar.read_bytes()[:-700])
    assert "train-000001.tar has " in message(copy)


def test_missing_index(copy: Path) -> None:
    index_path(copy / "train-000000.tar").unlink()
    assert "train-000000.index.safetensors is missing" in message(copy, FileNotFoundError)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_index(copy: Path, keep: int) -> None:
    index = index_path(copy / "train-000000.tar")
    index.write_bytes(index.read_bytes()[:keep])
    assert "train-000000.index.safetensors is damaged" in message(copy)


def test_index_of_another_shard(copy: Path) -> None:
    index = index_path(copy / "train-000000.tar")
    index.write_bytes(index_path(copy / "train-000001.tar").read_bytes())
    assert "belongs to other shards" in message(copy)


def test_unknown_split_names_those_there_are(shards: Path) -> None:
    with pytest.raises(ValueError, match="no split 'val' here: there are train, test"):
        open_split(shards, "val")


def test_label_vectors_fit_the_class_list(copy: Path) -> None:
    with pytest.raises(ValueError, match="has no label vectors"):
        load_label_vectors(copy, Manifest.load(copy))
    replace(copy, label_vectors="label_vectors.safetensors")
    path = copy / "label_vectors.safetensors"
    for wrong, said in (
        (np.zeros((3, 2), np.float32), r"has shape \[3, 2\]"),
        (np.full((4, 2), np.nan, np.float32), "not finite"),
    ):
        save_file({"vectors": wrong}, path)
        with pytest.raises(ValueError, match=said):
            load_label_vectors(copy, Manifest.load(copy))
    path.write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="is damaged"):
        load_label_vectors(copy, Manifest.load(copy))
