"""Datasets that the datasets library opens. The tests use local files only."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Image, Sequence, Value

from data.shards.manifest import Manifest
from data.shards.writing.writer import write_shards
from data.sources import HuggingFace
from tests.data.conftest import kway_shard, read, read_sets, write_image
from tests.noise_images import image


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write_parquet(path: Path, features: Features, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_dict(columns, features).to_parquet(str(path))
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> tuple[Path, list[bytes]]:
    """Write a folder of Parquet files with a train and a test split. The last row has no label."""
    features = Features({"image": Image(), "label": ClassLabel(names=["zoo ", "air"])})
    content = [image(i) for i in range(5)]
    rows = [{"bytes": data, "path": None} for data in content]
    folder = tmp_path / "in/data"
    write_parquet(
        folder / "train-00000-of-00001.parquet", features, image=rows[:3], label=[0, 1, 1]
    )
    write_parquet(folder / "test-00000-of-00001.parquet", features, image=rows[3:], label=[1, -1])
    return tmp_path / "in", content


def test_original_images_names_and_splits_are_kept(
    tmp_path: Path, pictures: tuple[Path, list[bytes]]
) -> None:
    folder, content = pictures
    source = HuggingFace(str(folder), tmp_path / "work", original=True)
    notes = source.notes()
    source = pickle.loads(pickle.dumps(source))  # as a worker process receives it
    write_shards(source, tmp_path / "out", workers=1)
    assert Manifest.load(tmp_path / "out").class_names == ("zoo", "air")
    train = dict(zip(content[:3], ("zoo", "air", "air"), strict=True))
    assert read(tmp_path / "out", "train") == train
    assert read(tmp_path / "out", "test") == {content[3]: "air"}
    assert "split 'test': 1 rows without a label are skipped" in notes


def test_every_column_of_a_single_file_can_be_selected(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(60)]
    topics = [("b", "a", "a")[i % 3] for i in range(60)]
    features = Features(
        {"body": Value("string"), "title": Value("string"), "topic": Value("string")}
    )
    columns = {"body": texts, "title": texts, "topic": topics}
    file = write_parquet(tmp_path / "rows.parquet", features, **columns)
    named = ("--text-column", "body", "--label-column", "topic")
    done = kway_shard("hf", file, "-o", tmp_path / "out", *named, "--test-fraction", 0.3)
    assert done.exit_code == 0, done.output
    line = "random split, because the only split is 'train': 30% of the samples"
    assert line in done.stderr.splitlines()[0]
    found = {**read(tmp_path / "out", "train"), **read(tmp_path / "out", "test")}
    assert found == {text.encode(): topic for text, topic in zip(texts, topics, strict=True)}
    assert Manifest.load(tmp_path / "out").modality == "text"


def test_class_folders_keep_their_splits_and_bytes(tmp_path: Path) -> None:
    for number, path in enumerate(("train/cat/1", "train/dog/2", "validation/dog/3")):
        write_image(tmp_path / "in" / f"{path}.png", number)
    source = HuggingFace(str(tmp_path / "in"), tmp_path / "work", original=True)
    write_shards(source, tmp_path / "out", workers=0)
    content = (tmp_path / "in/validation/dog/3.png").read_bytes()
    assert read(tmp_path / "out", "test") == {content: "dog"}
    assert set(read(tmp_path / "out", "train").values()) == {"cat", "dog"}


def test_split_folders_are_not_classes(tmp_path: Path) -> None:
    for number, path in enumerate(("train/1", "train/2", "test/3")):
        write_image(tmp_path / "in" / f"{path}.png", number)
    with pytest.raises(ValueError, match=r"label|are the names of splits"):
        HuggingFace(str(tmp_path / "in"), tmp_path / "work").classes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_column": "b", "label_column": "y"}, "column 'b' does not exist"),
        ({"text_column": "text"}, "pass the column as --label-column: choose from text, y, tags"),
        ({"text_column": "text", "label_column": "tags"}, "column 'tags' has the type List"),
    ],
)
def test_other_columns_raise(tmp_path: Path, options: dict[str, str], message: str) -> None:
    number = Value("int64")
    features = Features({"text": Value("string"), "y": number, "tags": Sequence(number)})
    columns = {"text": ["a", "b"], "y": [1, 2], "tags": [[1], [2]]}
    file = write_parquet(tmp_path / "a.parquet", features, **columns)
    with pytest.raises(ValueError, match=message):
        HuggingFace(str(file), tmp_path / "work", **options).splits()


@pytest.mark.parametrize("names", [["zoo", "air", "unused"], None])
def test_a_column_of_lists_becomes_sets(tmp_path: Path, names: list[str] | None) -> None:
    kind = Value("string") if names is None else ClassLabel(names=names)
    features = Features({"text": Value("string"), "tags": Sequence(kind)})
    rows = [["air", "zoo"], ["zoo"], [], None]
    file = write_parquet(tmp_path / "a.parquet", features, text=["a", "b", "c", "d"], tags=rows)
    columns = ("--text-column", "text", "--label-column", "tags", "--test-fraction", 0)
    done = kway_shard("hf", file, *columns, "--label-sets", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    classes = ["air", "zoo"] if names is None else ["zoo", "air"]
    assert Manifest.load(tmp_path / "out").class_names == classes
    assert read_sets(tmp_path / "out") == {"a": classes, "b": ["zoo"], "c": []}
    assert "1 rows without a label are skipped" in done.stderr
    failed = kway_shard(
        "table", file, "--text", "text", "--label", "tags", "--label-sets", "-o", tmp_path / "table"
    )
    assert names is None or "use kway shard hf" in str(failed.exception)


def test_what_the_library_cannot_open_raises(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 damaged")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be opened"):
        HuggingFace(str(tmp_path / "a.parquet"), tmp_path / "work").classes()
    (tmp_path / "in").mkdir()
    (tmp_path / "in/in.py").write_text("raise SystemExit('this code must not run')")
    with pytest.raises(ValueError, match="cannot be opened"):
        HuggingFace(str(tmp_path / "in"), tmp_path / "work").classes()


def test_a_bad_image_names_its_split_and_row(tmp_path: Path) -> None:
    features = Features({"image": Image(), "label": Value("string")})
    good = {"bytes": image(0), "path": None}
    rows = [good, good, {"bytes": b"text", "path": None}]
    file = write_parquet(tmp_path / "a.parquet", features, image=rows, label=["a", "b", "b"])
    source = HuggingFace(str(file), tmp_path / "work", test_fraction=0)
    with pytest.raises(ValueError, match=r"a\.parquet, split train, row 2: not an image"):
        write_shards(source, tmp_path / "out", workers=0)
    source = HuggingFace(str(file), tmp_path / "work", test_fraction=0, skip_bad=True)
    assert write_shards(source, tmp_path / "out", workers=0).num_skipped == 1


def test_a_missing_text_names_its_split_and_row(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["a", "b"])})
    file = write_parquet(tmp_path / "t.parquet", features, text=["x", "  "], label=[0, 1])
    done = kway_shard("hf", file, "--text-column", "text", "-o", tmp_path / "out")
    assert "row 1: there is no text: correct the row" in str(done.exception)
