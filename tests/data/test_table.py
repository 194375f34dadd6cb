"""Tables of texts or images with labels."""

import json
from pathlib import Path

import pyarrow as arrow
import pytest
from pyarrow import parquet
from typer.testing import CliRunner, Result

from data.shards.manifest import Manifest
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.skipped import SKIPPED
from data.sources import Table
from launch.commands.shard import app
from tests.data.conftest import write_image

TEXTS = [("so, good", "yes"), ("no\ttabs", "no"), ('"quoted" ❤️', "yes"), ("ende", "10")]


def kway(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def read(shards: Path, split: str = "train") -> dict[str, str]:
    """Return a mapping from text to class name."""
    with open_split(shards, split) as opened:
        read = [opened.read(i) for i in range(len(opened))]
        return {data.decode(): opened.classes[label].name for data, _, label in read}


def write_csv(path: Path) -> Path:
    rows = ['"{}",{}'.format(text.replace('"', '""'), label) for text, label in TEXTS]
    path.write_text("\n".join(["text,label", *rows]) + "\n", encoding="utf-8")
    return path


def write_jsonl(path: Path) -> Path:
    rows = [json.dumps({"text": text, "label": label}) for text, label in TEXTS]
    path.write_text("\n".join(rows))
    return path


@pytest.mark.parametrize(("name", "make"), [("a.csv", write_csv), ("a.jsonl", write_jsonl)])
def test_tables_of_texts_store_every_text_unchanged(tmp_path: Path, name: str, make) -> None:
    file = make(tmp_path / name)
    done = kway(
        "table", file, "-o", tmp_path / "out", "--text", "text", "--label", "label",
        "--test-fraction", 0,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert read(tmp_path / "out") == dict(TEXTS)
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.modality == "text"
    assert manifest.class_names == ("10", "no", "yes")
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "out"]


def test_parquet_and_csv_give_the_same_samples(tmp_path: Path) -> None:
    texts, labels = zip(*TEXTS, strict=True)
    columns = {"text": list(texts), "label": list(labels), "unused": [b"\xff"] * len(TEXTS)}
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet", row_group_size=2)
    source = Table(
        (tmp_path / "a.parquet",), tmp_path / "work", "label", text="text", test_fraction=0
    )
    write_shards(source, tmp_path / "out", workers=2)
    assert read(tmp_path / "out") == dict(TEXTS)


def test_parquet_without_pyarrow_raises_an_error_that_states_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"requires pyarrow: run pip install .*\[parquet\]"):
        Table((tmp_path / "a.parquet",), tmp_path / "work", "label", text="text")


def test_labels_that_are_numbers_are_sorted_numerically(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("t\ty\na\t10\nb\t9\nc\t100\n")
    source = Table((tmp_path / "a.tsv",), tmp_path / "work", "y", text="t", test_fraction=0)
    assert [info.name for info in source.classes()] == ["9", "10", "100"]


def test_a_column_determines_the_split(tmp_path: Path) -> None:
    rows = ["a,x,train", "b,y,Train", "c,x,test", "a,x,dev", "a,x,train"]
    (tmp_path / "a.csv").write_text("\n".join(["t,y,part", *rows]))
    source = Table((tmp_path / "a.csv",), tmp_path / "work", "y", text="t", split="part")
    write_shards(source, tmp_path / "out", workers=0)
    assert read(tmp_path / "out") == {"a": "x", "b": "y"}
    assert read(tmp_path / "out", "validation") == {"a": "x"}
    assert read(tmp_path / "out", "test") == {"c": "x"}
    assert set(source.notes()) == {
        "rows read: 5",
        "duplicates kept: 1",
        "texts of other splits kept in training: 2",
    }
    dropped = Table(
        (tmp_path / "a.csv",),
        tmp_path / "work",
        "y",
        text="t",
        split="part",
        duplicates="drop",
    )
    assert {name: len(tasks) for name, tasks in dropped.splits().items()} == {
        "train": 2,
        "test": 1,
        "validation": 1,
    }


def test_tables_of_images_pack_the_images(tmp_path: Path) -> None:
    for i, (height, width) in enumerate([(20, 30), (90, 60), (20, 20)]):
        write_image(tmp_path / f"p/{i}.png", i, height, width)
    (tmp_path / "a.csv").write_text("file,kind\np/0.png,a\np/1.png,b\np/2.png,a\n")
    done = kway(
        "table", tmp_path / "a.csv", "-o", tmp_path / "out", "--image", "file",
        "--label", "kind", "--short-side", 40, "--test-fraction", 0,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert Manifest.load(tmp_path / "out").modality == "image"
    with open_split(tmp_path / "out", "train") as split:
        found = {split.read(i)[0]: split.read(i)[1:] for i in range(3)}
    assert sorted(extension for extension, _ in found.values()) == ["jpg", "png", "png"]
    assert found[(tmp_path / "p/0.png").read_bytes()] == ("png", 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [("../secret.png", r"'\.\./secret\.png' is outside"), ("gone.png", "correct the row, or pass")],
)
def test_a_bad_image_raises_an_error_that_states_the_fix(
    tmp_path: Path, name: str, message: str
) -> None:
    for path in ("secret.png", "in/0.png", "in/1.png"):
        write_image(tmp_path / path, 0)
    file = tmp_path / "in/a.csv"
    file.write_text(f"file,kind\n0.png,a\n1.png,b\n{name},a\n")
    source = Table((file,), tmp_path / "work", "kind", image="file", test_fraction=0)
    with pytest.raises(ValueError, match=message):
        write_shards(source, tmp_path / "out", workers=0)


def test_bad_images_can_be_skipped(tmp_path: Path) -> None:
    write_image(tmp_path / "0.png", 0)
    write_image(tmp_path / "1.png", 1)
    (tmp_path / "a.csv").write_text("file,kind\n0.png,a\n1.png,b\na.csv,a\ngone.png,b\n")
    source = Table(
        (tmp_path / "a.csv",),
        tmp_path / "work",
        "kind",
        image="file",
        test_fraction=0,
        skip_bad=True,
    )
    assert write_shards(source, tmp_path / "out", workers=0).num_skipped == 2
    lines = (tmp_path / "out" / SKIPPED).read_text().splitlines()
    assert sorted(json.loads(line)["name"] for line in lines) == ["a.csv", "gone.png"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("t,y\na,b\n", {}, r"either texts \(--text\) or images \(--image\)"),
        ("t,y\na,b\n", {"text": "t", "image": "t"}, "pass the column of either texts"),
        ("t,y\na,b\n", {"text": "x"}, r"a\.csv: column 'x' does not exist: choose from t, y"),
        ("t,y\na,b\nc,b\n", {"text": "t"}, "column 'y' has 1 classes with 1 or more rows"),
        ("t,y\na,b,c\n", {"text": "t"}, r"byte 4: the row has 3 cells, but the first line has 2"),
        ("t,y\na,b\n", {"text": "t", "split": "y"}, "0 classes|has no training rows"),
        (
            "t,y\na,b\n",
            {"text": "t", "test_fraction": 1},
            "test_fraction\n  Input should be less than 1",
        ),
    ],
)
def test_invalid_tables_and_options_raise(
    tmp_path: Path, content: str, options: dict, message: str
) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        Table((tmp_path / "a.csv",), tmp_path / "work", "y", **options).splits()


def test_rows_without_text_or_label_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("t,y\na,x\nb,y\n ,x\nc,\n")
    source = Table((tmp_path / "a.csv",), tmp_path / "work", "y", text="t", test_fraction=0)
    assert len(source.splits()["train"]) == 2
    assert "rows without text, path or label skipped: 2" in source.notes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--quality", 90, "--skip-bad"),
            "--quality, --skip-bad: supported only for tables of images",
        ),
        (
            ("--split", "s", "--test-fraction", 0.2),
            "--test-fraction: cannot be combined with --split",
        ),
    ],
)
def test_options_for_another_kind_of_table_raise(
    tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    (tmp_path / "a.csv").write_text("text,label,s\na,1,train\nb,2,train\n")
    named = ("--text", "text", "--label", "label", "-o", tmp_path / "out")
    failed = kway("table", tmp_path / "a.csv", *named, *options)
    assert isinstance(failed.exception, ValueError)
    assert message in str(failed.exception)


def hugging_face(path: Path, rows: list[tuple[bytes | None, str | None, int]], **columns) -> Path:
    """Write a table as the datasets library does: struct images, and names in the metadata."""
    features = {
        "image": {"_type": "Image"},
        "label": {"_type": "ClassLabel", "names": ["zoo", "air"]},
    }
    info = {"info": {"features": features}}
    image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    table = arrow.table(
        {
            "image": arrow.array([{"bytes": b, "path": p} for b, p, _ in rows], image),
            "label": arrow.array([label for *_, label in rows], arrow.int64()),
            **columns,
        }
    ).replace_schema_metadata({"huggingface": json.dumps(info)})
    parquet.write_table(table, path, row_group_size=2)
    return path


def images(folder: Path, number: int) -> list[bytes]:
    for i in range(number):
        write_image(folder / f"{i}.png", i, 20 + 40 * (i == 1), 50)
    return [(folder / f"{i}.png").read_bytes() for i in range(number)]


def read_images(shards: Path, split: str) -> dict[bytes, str]:
    with open_split(shards, split) as opened:
        found = [opened.read(i) for i in range(len(opened))]
        return {data: opened.classes[label].name for data, _, label in found}


def test_parquet_of_the_datasets_library_is_sharded_with_one_command(tmp_path: Path) -> None:
    found = images(tmp_path, 6)
    rows = [(data, f"{i}.png", i % 2) for i, data in enumerate(found)]
    # The last image is only a path, and the label -1 means that there is none.
    rows[5] = (None, "5.png", 1)
    train = hugging_face(tmp_path / "train-00000-of-00001.parquet", [rows[i] for i in (0, 3, 5)])
    val = hugging_face(
        tmp_path / "validation-00000-of-00001.parquet", [rows[2], rows[1], (found[4], None, -1)]
    )
    done = kway(
        "table", train, val, "-o", tmp_path / "out", "--image", "image", "--label", "label",
        "--split-from-name", "--original", "--workers", 2,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert Manifest.load(tmp_path / "out").class_names == ("zoo", "air")
    assert read_images(tmp_path / "out", "train") == {
        found[0]: "zoo",
        found[3]: "air",
        found[5]: "air",
    }
    assert read_images(tmp_path / "out", "test") == {found[1]: "air", found[2]: "zoo"}
    assert "rows without text, path or label skipped: 1" in done.stderr
    assert not (tmp_path / "out.first-pass").exists()


def test_a_binary_column_contains_images(tmp_path: Path) -> None:
    """This is the layout that img2dataset writes, with empty images where a download failed."""
    found = images(tmp_path, 3)
    columns = {
        "url": ["https://example.org/a"] * 4,
        "jpg": [*found, None],
        "topic": ["a", "b", "a", "b"],
    }
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    options = {"image": "jpg", "test_fraction": 0, "original": True}
    source = Table((tmp_path / "a.parquet",), tmp_path / "work", "topic", **options)
    write_shards(source, tmp_path / "out", workers=0)
    assert read_images(tmp_path / "out", "train") == dict(zip(found, "aba", strict=True))
    assert "rows without text, path or label skipped: 1" in source.notes()
    url = Table((tmp_path / "a.parquet",), tmp_path / "work2", "topic", image="url")
    with pytest.raises(ValueError, match=r"is a URL outside .*, which kway does not"):
        write_shards(url, tmp_path / "out2", workers=0)


def test_a_bad_image_in_parquet_names_the_file_and_the_row(tmp_path: Path) -> None:
    found = images(tmp_path, 2)
    rows = [(found[0], None, 0), (found[1], None, 1), (b"text", None, 1)]
    file = hugging_face(tmp_path / "a.parquet", rows)
    source = Table((file,), tmp_path / "work", "label", image="image", test_fraction=0)
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: not an image: .*: correct the row"):
        write_shards(source, tmp_path / "out", workers=0)
    source = Table(
        (file,), tmp_path / "work", "label", image="image", test_fraction=0, skip_bad=True
    )
    assert write_shards(source, tmp_path / "out", workers=0).num_skipped == 1
    line = json.loads((tmp_path / "out" / SKIPPED).read_text())
    assert line["name"] == "a.parquet, row 2"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 2**31 - 1], arrow.date32()),
        ([0, 2**62], arrow.timestamp("us")),
        ([0, 2**62], arrow.duration("s")),
    ],
)
def test_parquet_values_that_python_cannot_represent_are_errors_with_file_and_row(
    tmp_path: Path, values: list[int], kind: arrow.DataType
) -> None:
    columns = {"text": ["a", "b"], "label": arrow.array(values, kind)}
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    failed = kway(
        "table", tmp_path / "a.parquet", "-o", tmp_path / "out", "--text", "text",
        "--label", "label",
    )  # fmt: skip
    assert isinstance(failed.exception, ValueError)
    assert f"{tmp_path / 'a.parquet'}, row 1: " in str(failed.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_damaged_parquet_names_the_file(tmp_path: Path) -> None:
    columns = {"text": [f"{i} {'x' * 50}" for i in range(1000)], "label": ["a", "b"] * 500}
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet", use_dictionary=False)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[60:160] = bytes(100)
    (tmp_path / "a.parquet").write_bytes(content)
    source = Table((tmp_path / "a.parquet",), tmp_path / "work", "label", text="text")
    with pytest.raises(ValueError, match=r"a\.parquet, row 0 or later: .*: correct it"):
        source.classes()


def test_an_invalid_row_of_parquet_is_named_by_file_and_row(tmp_path: Path) -> None:
    columns = {"text": ["a", "b", "c"], "label": ["x", "y", "x"], "part": ["train", "test", "a b"]}
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    source = Table((tmp_path / "a.parquet",), tmp_path / "work", "label", text="text", split="part")
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: the row names an invalid split"):
        source.classes()


def test_an_error_of_the_output_is_not_reported_as_an_error_of_the_table(tmp_path: Path) -> None:
    parquet.write_table(arrow.table({"text": ["a"], "label": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "work").write_text("a file where the folder should be")
    source = Table((tmp_path / "a.parquet",), tmp_path / "work", "label", text="text")
    with pytest.raises(OSError, match="work") as raised:
        source.classes()
    assert not isinstance(raised.value, ValueError)


def test_identical_images_in_parquet_are_in_the_same_split(tmp_path: Path) -> None:
    found = images(tmp_path, 10)
    rows = [(data, f"{copy}.png", 0) for data in found for copy in range(2)]
    file = hugging_face(tmp_path / "a.parquet", [*rows, (found[0], None, 1)])
    source = Table(
        (file,), tmp_path / "work", "label", image="image", test_fraction=0.5, original=True
    )
    write_shards(source, tmp_path / "out", workers=0)
    train, test = (read_images(tmp_path / "out", split).keys() for split in ("train", "test"))
    assert train
    assert test
    assert not train & test


@pytest.mark.parametrize(
    ("metadata", "labels", "message"),
    [
        (b"[1]", [0, 1], "metadata of the datasets library are damaged"),
        (b"{", [0, 1], "metadata of the datasets library are damaged"),
        (b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a", "a"]}}}}',
         [0, 1], "class names of column 'label' are not unique"),
        (b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a", "b"]}}}}',
         [0, 2], "has label '2', but the table names 2 classes"),
    ],
)  # fmt: skip
def test_invalid_class_names_in_parquet_raise(
    tmp_path: Path, metadata: bytes, labels: list[int], message: str
) -> None:
    found = images(tmp_path, 2)
    table = arrow.table({"image": found, "label": labels})
    parquet.write_table(
        table.replace_schema_metadata({b"huggingface": metadata}), tmp_path / "a.parquet"
    )
    with pytest.raises(ValueError, match=message):
        Table((tmp_path / "a.parquet",), tmp_path / "work", "label", image="image").classes()


def test_tables_with_different_class_names_raise(tmp_path: Path) -> None:
    found = images(tmp_path, 2)
    first = hugging_face(tmp_path / "a.parquet", [(found[0], None, 0)])
    parquet.write_table(arrow.table({"image": found, "label": [0, 1]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet: the class names .* differ from those in"):
        Table((first, tmp_path / "b.parquet"), tmp_path / "work", "label", image="image")


def test_the_split_in_a_file_name_must_exist_and_be_the_only_one(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("t,y\na,x\nb,y\n")
    arguments = ((tmp_path / "rows.csv",), tmp_path / "work", "y")
    with pytest.raises(ValueError, match="its name does not contain a split"):
        Table(*arguments, text="t", split_from_name=True)
    with pytest.raises(ValueError, match="--split-from-name: cannot be combined with --split"):
        Table(*arguments, text="t", split="t", split_from_name=True)
