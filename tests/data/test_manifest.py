"""Errors raised for a damaged folder of shards."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file

from data.shards.index import FORMAT, FORMAT_OF_SETS, _crc32, index_path
from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import Manifest
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.sources import EmojiNames
from data.tars.indexing import index_shards
from tests.data.conftest import damage_of, open_index
from tests.file_errors import error


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


EDITS = {
    "has format version 5, but this version of kway reads versions up to 4": {"format_version": 5},
    "class 'apple' is listed twice": {"classes": [{"name": "apple"}] * 4},
    "its checksum does not match": {"classes": [{"name": name} for name in "abcde"]},
    "must be set together": {"label_vectors": "label_vectors.safetensors"},
    "1000000000000 samples do not fit": {"samples": 10**12},
}


@pytest.mark.parametrize("expected", EDITS)
def test_an_edited_manifest_raises(copy: Path, expected: str) -> None:
    changes = EDITS[expected]
    if "samples" in changes:
        shards = json.loads((copy / "manifest.json").read_text())["shards"]
        changes = {"shards": [shards[0] | changes]}
    edit(copy, **changes)
    assert expected in message(copy)


@pytest.mark.parametrize(
    ("file", "keep", "expected"),
    [
        ("manifest.json", None, "manifest.json is missing: run kway shard"),
        ("manifest.json", 300, "manifest.json is damaged"),
        ("train-000001.tar", None, "train-000001.tar is missing"),
        ("train-000001.tar", -700, "train-000001.tar has "),
        ("train-000000.index.safetensors", None, "train-000000.index.safetensors is missing"),
        ("train-000000.index.safetensors", 4, "train-000000.index.safetensors is damaged"),
        ("train-000000.index.safetensors", -1, "train-000000.index.safetensors is damaged"),
    ],
)
def test_a_missing_or_truncated_file_raises(
    copy: Path, file: str, keep: int | None, expected: str
) -> None:
    content = (copy / file).read_bytes()
    if keep is None:
        (copy / file).unlink()
    else:
        (copy / file).write_bytes(content[:keep])
    assert expected in message(copy, FileNotFoundError if keep is None else ValueError)


def test_a_set_to_which_an_earlier_version_appended_samples_can_be_indexed(copy: Path) -> None:
    path = copy / "manifest.json"
    names = Manifest.read(copy).class_names
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    assert "delete it, and run kway shard index --classes FILE" in message(copy)
    path.unlink()
    (copy / "names.txt").write_text("\n".join(names))
    assert index_shards(copy, classes=copy / "names.txt").manifest.class_names == names


def test_an_index_with_an_edited_label_raises(copy: Path) -> None:
    path = index_path(copy / "train-000000.tar")
    content = bytearray(path.read_bytes())
    with safe_open(path, framework="numpy") as file:
        labels = file.get_tensor("labels").tobytes()
    content[content.index(labels)] ^= 1  # another valid class
    path.write_bytes(content)
    assert "its checksum does not match" in message(copy)


@pytest.mark.parametrize(("name", "wrong", "member"), [("extension", 9, 0), ("places", 0, 1)])
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


def test_an_index_in_another_format_raises(copy: Path) -> None:
    other = FORMAT_OF_SETS + 1
    path = index_path(copy / "train-000000.tar")
    with safe_open(path, framework="numpy") as file:
        about = json.loads(file.metadata()["kway"])
    about["format"] = other
    save_file(load_file(path), path, metadata={"kway": json.dumps(about)})
    assert f"has format {other}, but this version of kway reads {FORMAT} and" in message(copy)


def test_the_index_of_another_shard_raises(copy: Path) -> None:
    index = index_path(copy / "train-000000.tar")
    index.write_bytes(index_path(copy / "train-000001.tar").read_bytes())
    assert "does not match the manifest" in message(copy)


def test_an_unknown_split_raises_an_error_that_lists_the_existing_splits(shards: Path) -> None:
    with pytest.raises(ValueError, match="no split 'val': choose from the splits train, test"):
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


def test_damaged_label_vectors_raise_and_the_writer_replaces_them(tmp_path: Path) -> None:
    source = EmojiNames(9, languages=("en",), test_languages=())
    manifest = write_shards(source, tmp_path, workers=0).manifest
    path = tmp_path / "label_vectors.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with pytest.raises(ValueError, match=f"{path} does not match the manifest"):
        load_label_vectors(tmp_path, manifest)
    (damage,) = damage_of(tmp_path)
    assert damage.kind == "label vectors"
    assert not write_shards(source, tmp_path, workers=0).complete_before
    assert path.read_bytes() == whole
    assert write_shards(source, tmp_path, workers=0).complete_before


@pytest.mark.parametrize("name", ["a\x1b[31m.tar", "a\u2028.tar", "../train-000000.tar", "a\\b"])
def test_a_file_or_split_with_control_characters_raises(copy: Path, name: str) -> None:
    shards = json.loads((copy / "manifest.json").read_text())["shards"]
    edit(copy, shards=[shards[0] | {"file": name}])
    assert "shards.0.file" in message(copy)
    edit(copy, shards=[shards[0] | {"split": name}])
    assert "shards.0.split" in message(copy)


def test_reading_the_manifest_is_retried_after_a_transient_error(
    shards: Path, injected: Callable[..., None]
) -> None:
    injected("stat", "manifest.json", error("ESTALE"), times=2)
    Manifest.read(shards)
