"""The columnar class list: the same classes as Python objects, lookups, unions and its file."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from data.classes.class_list import ClassInfo, ClassList
from data.classes.strings import CHUNK, Strings, hash_of
from data.config import DataConfig
from data.shards import manifest
from data.shards.manifest import CLASSES, Manifest
from data.shards.mixture import load_manifest
from data.sources.generated import LabeledSample, write_shards
from data.tars.labels import read_class_names

NAMES = ["", "a", "zwölf", "日本", "a b", "🙂", "a" * 300]
INFOS = [
    ClassInfo(name="ant", attributes={"path": "animals > insects", "emoji": "🐜"}),
    ClassInfo(name="bee", attributes={"emoji": "🐝", "path": "animals > insects"}),
    ClassInfo(name="crane"),
    ClassInfo(name="dog", attributes={"path": "animals"}),
]


def test_strings_are_a_sequence() -> None:
    column = Strings.of(NAMES)
    assert list(column) == NAMES == [column[i] for i in range(len(NAMES))] == column
    assert column[2:5] == NAMES[2:5]
    assert column[-1] == NAMES[-1]
    assert column[5:2] == []
    assert column.at(np.array([3, 0, 3])) == ["日本", "", "日本"]
    assert Strings.joined([column, column[1:2]]) == [*NAMES, "a"]
    assert column != NAMES[:-1]
    assert column != [*NAMES[:-1], "b"]
    with pytest.raises(IndexError):
        column[len(NAMES)]


def test_a_hash_depends_only_on_the_string() -> None:
    column = Strings.of(f"class {i}" for i in range(2 * CHUNK + 3))
    hashes = column.hashes()
    assert len(np.unique(hashes)) == len(column)
    assert (column[70_000:70_002].hashes() == hashes[70_000:70_002]).all()
    # Files contain the hashes, so they must never change.
    assert Strings.of(["ab"]).hashes()[0] == 17150621014597373479
    assert [hash_of(name) for name in NAMES] == Strings.of(NAMES).hashes().tolist()


def test_a_class_list_returns_the_classes_from_which_it_was_made(tmp_path: Path) -> None:
    made = ClassList.of(INFOS)
    made.write(tmp_path / "classes")
    opened = ClassList.open(tmp_path / "classes", len(INFOS))
    for classes in (made, opened):
        assert list(classes) == INFOS == classes[:]
        assert classes == made
        assert [list(info.attributes) for info in classes] == [[*i.attributes] for i in INFOS]
        paths, of_class = classes.paths()
        assert paths == ["animals > insects", "animals"]
        assert of_class.tolist() == [0, 0, -1, 1]
    assert ClassList.of_names(info.name for info in INFOS) != made


def test_names_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = ClassList.of_names(NAMES[1:])
    wanted = Strings.of(["日本", "b", "a", "A", "", "a b"])
    expected = [2, None, 0, None, None, 3]
    assert [classes.find(name) for name in wanted] == expected
    assert classes.find_all(wanted).tolist() == [-1 if one is None else one for one in expected]
    assert classes.find("\ud800") is None
    assert classes.find_all(Strings.of([])).tolist() == []
    # Names with equal hashes are distinguished.
    monkeypatch.setattr("data.classes.strings._hashes", lambda chunk: np.zeros(len(chunk), "u8"))
    monkeypatch.setattr("data.classes.class_list.hash_of", lambda name: 0)
    classes = ClassList.of_names(NAMES[1:])
    assert [classes.find(name) for name in wanted] == expected
    assert classes.find_all(wanted).tolist() == [-1 if one is None else one for one in expected]
    with pytest.raises(ValueError, match="class 'a' is listed twice"):
        ClassList.of_names(["b", "a", "c", "a"])


def test_texts_that_cannot_be_stored_or_read_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'a\\ud800' contains a lone surrogate"):
        ClassList.of_names(["b", "a\ud800"])
    with pytest.raises(ValueError, match="the name of class 1 is empty"):
        ClassList.of_names(["b", ""])
    ends = np.array([1, 9])
    damaged = ClassList({**ClassList.of_names("ab").columns, "name_ends": ends}, tmp_path)
    for read in (list, lambda names: names[1], lambda names: names[:2].hashes()):
        with pytest.raises(ValueError, match=f"{tmp_path}: string"):
            read(damaged.names)


def test_a_union_appends_the_new_classes() -> None:
    ours, theirs = ClassList.of(INFOS[:3]), ClassList.of([INFOS[3], INFOS[1]])
    united, labels = ours.united(theirs)
    assert list(united) == INFOS
    assert labels.tolist() == [3, 1]
    united, labels = ClassList.of_names("ab").united(ClassList.of_names("cad"))
    assert united.names == ["a", "b", "c", "d"]
    assert labels.tolist() == [2, 0, 3]
    assert ours.united(ClassList.of(INFOS[:2]))[0] is ours


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_damaged_file_is_an_error(size: int, tmp_path: Path) -> None:
    path = tmp_path / "classes"
    ClassList.of(INFOS).write(path)
    with pytest.raises(ValueError, match="instead of 5"):
        ClassList.open(path, 5)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="damaged"):
        ClassList.open(path, len(INFOS))


def test_a_long_class_list_is_a_file_next_to_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [LabeledSample(f"text {i}", f"class {i}", "train") for i in range(9)]
    inline = write_shards(samples, tmp_path / "inline", modality="text")
    monkeypatch.setattr(manifest, "MAX_INLINE_CLASSES", 8)
    found = write_shards(samples, tmp_path / "file", modality="text")
    assert found.class_file is not None
    assert b"class 3" not in found.to_bytes()
    read = Manifest.load(tmp_path / "file")
    assert read == found
    assert read.classes == inline.classes
    monkeypatch.undo()
    mixed = DataConfig(shards=tmp_path / "file", mixture=[{"shards": tmp_path / "inline"}])
    assert load_manifest(mixed).classes == inline.classes
    pickled = pickle.dumps(read.classes)  # maps the file again
    assert len(pickled) < 1000
    assert pickle.loads(pickled) == read.classes
    # The command that wrote the shards repairs a changed or missing class list.
    path = tmp_path / "file" / CLASSES
    assert path.stat().st_mode & 0o777 == 0o644
    intact = path.read_bytes()
    path.write_bytes(intact[:-1] + b"?")
    with pytest.raises(ValueError, match=r"classes.safetensors is damaged or belongs to other"):
        Manifest.load(tmp_path / "file")
    for damage in (lambda: None, path.unlink):
        damage()
        monkeypatch.setattr(manifest, "MAX_INLINE_CLASSES", 8)
        write_shards(samples, tmp_path / "file", modality="text")
        monkeypatch.undo()
        assert path.read_bytes() == intact
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"classes.safetensors is missing"):
        Manifest.read(tmp_path / "file")


# -------------------------------------------------------------------- files of class names


def test_names_keep_their_order_and_are_stripped(tmp_path: Path) -> None:
    (tmp_path / "names").write_bytes("\ufeffzebra \r\n  crème brûlée\r\n東京\r\n\r\n".encode())
    assert read_class_names(tmp_path / "names") == ["zebra", "crème brûlée", "東京"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "names, line 1 is empty: write one class name per line"),
        (b"a\n\nb\n", "names, line 2 is empty"),
        (b"a\nb\n a\n", "names, line 3: 'a' is also on line 1"),
        (b"caf\xe9\n", "names is not UTF-8 text: save the file as UTF-8"),
    ],
)
def test_an_invalid_file_raises_an_error_that_names_the_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "names").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_class_names(tmp_path / "names")
