"""Tables of texts or images with labels."""

import csv
import json
from pathlib import Path

import pyarrow as arrow
import pytest
from pyarrow import parquet

from data.shards.manifest import Manifest
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.sources import Table
from data.sources.records import ParquetFile
from tests.data.conftest import kway_shard, read, read_sets, write_image
from tests.noise_images import image


def text_table(folder: Path, *lines: str, **options: object) -> Table:
    """Return a table of texts in column `t` with, by default, the labels in column `y`."""
    (folder / "a.csv").write_text("\n".join(lines))
    return Table((folder / "a.csv",), folder / "work", text="t", **{"label": "y", **options})


def image_table(folder: Path, *rows: str, **options: object) -> Table:
    """Return a table of images with the columns `file` and `kind`."""
    (folder / "a.csv").write_text("\n".join(["file,kind", *rows, ""]))
    work = folder / "work"
    return Table((folder / "a.csv",), work, "kind", image="file", test_fraction=0, **options)


def test_tables_of_texts_store_every_text_unchanged(tmp_path: Path) -> None:
    texts = {"so, good": "yes", "no\ttabs": "no", '"quoted" ❤️': "yes", "ende": "10"}
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as opened:
        csv.writer(opened).writerows([("text", "label"), *texts.items()])
    columns = ("--text", "text", "--label", "label", "--test-fraction", 0)
    done = kway_shard("table", tmp_path / "a.csv", "-o", tmp_path / "out", *columns)
    assert done.exit_code == 0, done.output
    assert read(tmp_path / "out") == {text.encode(): label for text, label in texts.items()}
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.modality == "text"
    assert manifest.class_names == ("10", "no", "yes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "out"]


def test_a_column_determines_the_split(tmp_path: Path) -> None:
    rows = ["a,x,train", "b,y,Train", "c,x,test", "a,x,dev", "a,x,train"]
    source = text_table(tmp_path, "t,y,part", *rows, split="part")
    write_shards(source, tmp_path / "out", workers=0)
    assert read(tmp_path / "out") == {b"a": "x", b"b": "y"}
    assert read(tmp_path / "out", "validation") == {b"a": "x"}
    assert read(tmp_path / "out", "test") == {b"c": "x"}
    assert set(source.notes()) == {
        "rows read: 5",
        "duplicates kept: 1",
        "training texts that also occur in another split, kept: 2",
    }
    dropped = text_table(tmp_path, "t,y,part", *rows, split="part", duplicates="drop").splits()
    assert [len(dropped[split]) for split in ("train", "test", "validation")] == [2, 1, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../secret.png", r"'\.\./secret\.png', which is outside"),
        ("gone.png", "the file does not exist: correct the row, or pass"),
        (f"{'x' * 300}.png", r"/x+\.png: the name of the file is too long: correct the row"),
    ],
)
def test_a_bad_image_raises_an_error_that_states_the_fix(
    tmp_path: Path, name: str, message: str
) -> None:
    for path in ("secret.png", "in/0.png", "in/1.png"):
        write_image(tmp_path / path, 0)
    source = image_table(tmp_path / "in", "0.png,a", "1.png,b", f"{name},a")
    with pytest.raises(ValueError, match=message):
        write_shards(source, tmp_path / "out", workers=0)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("t,y\na,b\n", {}, r"either texts \(--text\) or images \(--image\)"),
        ("t,y\na,b\n", {"text": "x"}, r"a\.csv: column 'x' does not exist: choose from t, y"),
        ("t,y\na,b\nc,b\n", {"text": "t"}, "found 1 classes with training samples"),
        ("t,y\na,b,c\n", {"text": "t"}, r"line 2: the row has 3 cells, but the first line has 2"),
        ("t,y\na,b\n", {"text": "t", "split": "y"}, "0 classes|has no training samples"),
        ("t,y\na,b\n", {"text": "t", "quality": 90}, "--quality: supported only for tables of im"),
        ("t,y\na,b\n", {"text": "t", "split": "y", "test_fraction": 0}, "--test-fraction: cannot"),
        ("t,y,z\na,b,c\n", {"text": "t", "label": "y, z"}, "'y, z' does not exist: pass --label-s"),
    ],
)
def test_invalid_tables_and_options_raise(
    tmp_path: Path, content: str, options: dict, message: str
) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        Table((tmp_path / "a.csv",), tmp_path / "work", **{"label": "y", **options}).splits()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a,\"['x', 'y']\"", "b,x"], r"a\.csv, line 2: the row has the label .*, a list"),
        (['a,"[z, w]"', "b,x"], r"a\.csv, line 2: the row has the label .*, a list"),
        (["a,x|y", "b,x", "c,y"], r"label 'x\|y' joins .*: pass --label-separator '\|',"),
        (['a,"x, y"', "b,x", "c,y"], "label 'x, y' joins other labels of column 'y'"),
    ],
)
def test_labels_that_look_like_lists_raise(tmp_path: Path, rows: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text_table(tmp_path, "t,y", *rows).classes()


def test_joined_labels_without_a_separator_raise_in_tables_but_not_in_lists(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"label 'x\|y' joins .*: pass --label-separator '\|',"):
        text_table(tmp_path, "t,y", "a,x|y", "b,x", "c,y", label_sets=True).classes()
    rows = [("a", ["x, y"]), ("b", ["x"]), ("c", ["y", "x, y"])]
    source = table_of_lists(tmp_path, rows)
    assert [info.name for info in source.classes()] == ["x", "x, y", "y"]


def write_rows(folder: Path, kind: str, rows: list[tuple[str, list[str] | None]]) -> Path:
    """Write a table whose column `y` has lists of labels or, in CSV, texts such as `a|b`."""
    path = folder / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(
            arrow.table({"t": [t for t, _ in rows], "y": [y for _, y in rows]}), path
        )
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"t": text, "y": labels}) for text, labels in rows))
    else:
        path.write_text("\n".join(["t,y", *(f"{t},{'|'.join(y or [])}" for t, y in rows)]))
    return path


def table_of_lists(folder: Path, rows: list[tuple[str, list[str] | None]]) -> Table:
    file = write_rows(folder, "jsonl", rows)
    return Table((file,), folder / "work", "y", text="t", test_fraction=0, label_sets=True)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_rows_with_several_labels_become_sets(tmp_path: Path, kind: str) -> None:
    rows = [
        ("one", ["b", " a"]), ("two", ["cafe\u0301", "caf\u00e9", "a"]), ("three", []),
        ("four", None), ("five", ["rare"]), ("six", ["", "b", "b"]), ("one", ["a", "b"]),
    ]  # fmt: skip
    options = ("--label-separator", "|") if kind == "csv" else ("--label-sets",)
    path = write_rows(tmp_path, kind, rows)
    columns = ("--text", "t", "--label", "y", "--test-fraction", 0)
    done = kway_shard(
        "table", path, "-o", tmp_path / "out", *columns, *options, "--drop-duplicates"
    )
    assert done.exit_code == 0, done.output
    assert read_sets(tmp_path / "out") == {
        "one": ["a", "b"], "two": ["a", "caf\u00e9"], "three": [], "four": [], "five": ["rare"],
        "six": ["b"],
    }  # fmt: skip
    for note in ("rows read: 7", "duplicates dropped: 1", "samples without labels: 2"):
        assert f"note: {note}\n" in done.stderr
    assert "6 train samples, 6 labels, 4 classes" in done.stdout
    frequent = ("--min-count", 2, "-o", tmp_path / "frequent")
    done = kway_shard("table", path, *columns, *options, *frequent)
    assert done.exit_code == 0, done.output
    found = read_sets(tmp_path / "frequent")
    assert (found["two"], found["five"]) == (["a"], [])
    assert "note: labels of excluded classes: 2\n" in done.stderr


def test_several_columns_become_one_set(tmp_path: Path) -> None:
    rows = ["a,x,y,train", "b,x,,train", "c,,,test", "d,y,y,test", "e,1.5,x,train"]
    options = {"label": "one, two", "split": "part", "label_sets": True}
    source = text_table(tmp_path, "t,one,two,part", *rows, **options)
    write_shards(source, tmp_path / "out", workers=0)
    train = {"a": ["x", "y"], "b": ["x"], "e": ["1.5", "x"]}
    assert read_sets(tmp_path / "out") == train
    assert read_sets(tmp_path / "out", "test") == {"c": [], "d": ["y"]}


def test_spellings_of_the_labels_of_sets_are_reported(tmp_path: Path) -> None:
    rows = [("a", ["Dog", "cat"]), ("b", ["\ufeffDog"]), ("c", ["dog", "cat "]), ("d", ["c\nat"])]
    source = table_of_lists(tmp_path, rows)
    assert [info.name for info in source.classes()] == ["Dog", "c at", "cat", "dog"]
    assert source.notes()[-3:] == [
        "'Dog', '\\ufeffDog' are the same class, 'Dog'",
        "'cat', 'cat ' are the same class, 'cat'",
        "classes 'Dog', 'dog' differ only by case",
    ]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (['{"t": "a", "y": [["b"]]}'], {"label_sets": True}, "line 1: the row has .*: pass lists"),
        (['{"t": "a", "y": {"b": 1}}'], {"label_sets": True}, r"\{'b': 1\}: pass lists of names"),
        (['{"t": "a", "y": ["\\ud800"]}'], {"label_sets": True}, "line 1: .* unpaired surrogate"),
        (['{"t": "a", "y": "[\'b\', 1]"}'], {"label_separator": "|"}, "a list: pass --label-sets"),
        (['{"t": "a", "y": ["b"]}'], {}, r"a list: pass --label-sets .* or --label-separator"),
        (['{"t": "a", "y": []}'] * 2, {"label_sets": True}, "found 0 classes"),
        (['{"t": "a", "y": []}'], {"label_sets": True, "hierarchy": "y"}, "--hierarchy: requires"),
    ],
)
def test_lists_that_are_not_sets_of_labels_raise(
    tmp_path: Path, lines: list[str], options: dict, message: str
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        Table((tmp_path / "a.jsonl",), tmp_path / "work", "y", text="t", **options).classes()


def test_a_cell_longer_than_the_limit_of_csv_is_read(tmp_path: Path) -> None:
    long = "x" * 300_000
    source = text_table(tmp_path, "t,y", f'"{long}\n{long}",a', "short,b", test_fraction=0)
    write_shards(source, tmp_path / "out", workers=0)
    assert read(tmp_path / "out") == {f"{long}\n{long}".encode(): "a", b"short": "b"}


def test_an_unclosed_quote_raises_even_at_the_end_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.csv, byte 8: .*: check for an unclosed quote"):
        text_table(tmp_path, "t,y", "a,x", '"b,y', "c,x").classes()


def test_spellings_of_the_same_class_are_merged_and_reported(tmp_path: Path) -> None:
    names = ["caf\u00e9", " cafe\u0301", "\ufeffDog", "dog"]
    rows = [json.dumps({"t": f"text {i}", "y": name}) for i, name in enumerate(names)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    source = Table((tmp_path / "a.jsonl",), tmp_path / "work", "y", text="t", test_fraction=0)
    assert [info.name for info in source.classes()] == ["Dog", "caf\u00e9", "dog"]
    assert source.notes()[-2:] == [
        "' cafe\\u0301', 'caf\\xe9' are the same class, 'café'",
        "classes 'Dog', 'dog' differ only by case",
    ]


def test_rows_of_a_group_stay_in_the_same_split(tmp_path: Path) -> None:
    rows = [f"text {i},{'ab'[i % 2]},patient {i % 40}" for i in range(400)]
    source = text_table(tmp_path, "t,y,who", *rows, group="who", test_fraction=0.3)
    groups = {
        split: {int(task.content.split()[1]) % 40 for task in tasks}
        for split, tasks in source.splits().items()
    }
    assert len(groups["train"]) + len(groups["test"]) == 40
    assert groups["train"].isdisjoint(groups["test"])
    assert 4 <= len(groups["test"]) <= 20


def test_a_class_with_two_hierarchies_raises(tmp_path: Path) -> None:
    rows = ("a,x,one > two", "b,x,one", "c,z,one")
    source = text_table(tmp_path, "t,y,up", *rows, hierarchy="up", test_fraction=0)
    with pytest.raises(ValueError, match="class 'x' has two hierarchies, 'one' and 'one > two'"):
        source.classes()


def test_a_path_may_lack_its_extension_and_its_folder(tmp_path: Path) -> None:
    for i, name in enumerate(("in/x/a.png", "in/y/z/b.1.png", "in/c.png", "in/.hidden/c.png")):
        write_image(tmp_path / name, i)
    rows = ("a,p", "z/b.1,q", f"{tmp_path}/in/c,p")
    source = image_table(tmp_path, *rows, images=tmp_path / "in", original=True)
    written = write_shards(source, tmp_path / "out", workers=0)
    assert written.manifest.shards[0].samples == 3
    with open_split(tmp_path / "out", "train") as split:
        found = {split.read(i)[0] for i in range(3)}
    assert found == {path.read_bytes() for path in tmp_path.glob("in/[xyc]*/**/*.png")} | {
        (tmp_path / "in/c.png").read_bytes()
    }


def test_two_candidates_for_a_path_raise(tmp_path: Path) -> None:
    for name in ("in/x/a.png", "in/y/a.jpg", "in/b.png"):
        write_image(tmp_path / name, 0)
    source = image_table(tmp_path, "b,p", "a,q", images=tmp_path / "in")
    with pytest.raises(ValueError, match=r"line 3: .* 'a', which may be x/a\.png or y/a\.jpg"):
        source.classes()


def test_the_same_image_with_two_labels_raises_an_error_that_names_both_rows(
    tmp_path: Path,
) -> None:
    source = image_table(tmp_path, "0.png,p", "1.png,q", "./0.png,q", "1.png,p")
    with pytest.raises(ValueError, match=r"a\.csv, line 2 and .*a\.csv, line 4: the same image"):
        source.classes()


def test_a_binary_column_contains_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the layout that img2dataset writes, with empty images where a download failed."""
    monkeypatch.setattr("data.sources.first_pass._CHUNK_ROWS", 2)
    found = [image(i) for i in range(3)]
    columns = {
        "url": ["https://example.org/a"] * 4,
        "jpg": [*found, None],
        "topic": ["a", "b", "a", "b"],
    }
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet", row_group_size=2)
    options = {"image": "jpg", "test_fraction": 0, "original": True, "workers": 2}
    source = Table((tmp_path / "a.parquet",), tmp_path / "work", "topic", **options)
    write_shards(source, tmp_path / "out", workers=0)
    assert read(tmp_path / "out", "train") == dict(zip(found, "aba", strict=True))
    assert "rows without text, path or label skipped: 1" in source.notes()
    url = Table((tmp_path / "a.parquet",), tmp_path / "work2", "topic", image="url")
    with pytest.raises(ValueError, match=r"has a URL outside .*, which kway does not"):
        write_shards(url, tmp_path / "out2", workers=0)


def test_a_struct_column_contains_images_or_paths(tmp_path: Path) -> None:
    write_image(tmp_path / "1.png", 1)
    found = [image(0), (tmp_path / "1.png").read_bytes()]
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    rows = [{"bytes": found[0], "path": "0.png"}, {"bytes": None, "path": "1.png"}]
    columns = {"image": arrow.array(rows, kind), "label": ["x", "y"]}
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    options = {"image": "image", "test_fraction": 0, "original": True}
    source = Table((tmp_path / "a.parquet",), tmp_path / "work", "label", **options)
    write_shards(source, tmp_path / "out", workers=0)
    assert read(tmp_path / "out", "train") == {found[0]: "x", found[1]: "y"}


def test_numbers_with_names_of_the_datasets_library_raise(tmp_path: Path) -> None:
    features = {"label": {"_type": "ClassLabel", "names": ["zoo", "air"]}}
    table = arrow.table({"text": ["a", "b"], "label": [0, -1]}).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"use kway shard hf .*a\.parquet"):
        Table((tmp_path / "a.parquet",), tmp_path / "work", "label", text="text")


def test_damaged_parquet_names_the_file(tmp_path: Path) -> None:
    columns = {"text": [f"{i} {'x' * 50}" for i in range(1000)], "label": ["a", "b"] * 500}
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet", use_dictionary=False)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[60:160] = bytes(100)
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet is not a valid Parquet file"):
        Table((tmp_path / "a.parquet",), tmp_path / "work", "label", text="text").classes()
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"b\.parquet is not a valid Parquet file"):
        Table((tmp_path / "b.parquet",), tmp_path / "work", "label", text="text")


def test_parquet_files_are_read_by_their_own_name_and_columns(tmp_path: Path) -> None:
    folder = tmp_path / "label=zzz"
    folder.mkdir()
    for name, text in (("a[1].parquet", "mine"), ("a1.parquet", "other")):
        parquet.write_table(arrow.table({"txt": [text], "label": ["A"]}), folder / name)
    (row,) = ParquetFile(folder / "a[1].parquet").records(["txt", "label"])
    assert (row.position, row.content) == (0, {"txt": "mine", "label": "A"})
    parquet.write_table(arrow.table({"file_row_number": [1]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="has a column file_row_number, which DuckDB reserves"):
        ParquetFile(tmp_path / "b.parquet")
