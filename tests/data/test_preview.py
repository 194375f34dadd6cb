"""`kway shard NAME --preview` prints what would be written, and writes nothing."""

from pathlib import Path

import pyarrow as arrow
import pytest
from pyarrow import parquet
from typer.main import get_command
from typer.testing import CliRunner, Result

from launch.commands.shard import app
from tests.data.conftest import write_image


def kway_shard(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def entries(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_the_preview_of_class_folders_shows_splits_classes_examples_and_ignored_files(
    tmp_path: Path,
) -> None:
    for path in ("train/a/0", "train/a/1", "train/b/0", "val/a/7"):
        write_image(tmp_path / "in" / f"{path}.png", len(path))
    (tmp_path / "in/train/a/notes.txt").write_text("text")
    before = entries(tmp_path)
    for out in ((), ("-o", tmp_path / "out")):
        done = kway_shard("imagefolder", tmp_path / "in", *out, "--preview")
        assert done.exit_code == 0, done.output
        assert entries(tmp_path) == before
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["2", "classes", "of", "images,", "from", "imagefolder"]
    assert ["train", "3", "2"] in rows
    assert ["test", "1", "1"] in rows
    assert ["a", "2", "1", "train/a/0.png", "train/a/1.png"] in rows
    assert "1 files and folders are not read" in done.stdout
    assert "train/a/notes.txt" in done.stdout
    assert "nothing was written" in done.stdout


def test_the_preview_of_a_table_shows_texts_and_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\ngood day,x\nbad day,y\n")
    before = entries(tmp_path)
    done = kway_shard(
        "table", tmp_path / "a.csv", "--text", "text", "--label", "label", "--preview",
        "-o", tmp_path / "out",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "good day" in done.stdout
    assert "note: rows read: 2" in done.stdout
    assert entries(tmp_path) == before


def test_a_bad_image_does_not_end_the_preview_of_a_table(tmp_path: Path) -> None:
    columns = {"jpg": [b"text", b"more text"], "path": ["0.png", "1.png"], "label": ["x", "y"]}
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    for column, example in (("jpg", "a.parquet, row 1"), ("path", "1.png")):
        done = kway_shard(
            "table", tmp_path / "a.parquet", "--image", column, "--label", "label", "--preview"
        )
        assert done.exit_code == 0, done.exception
        assert example in done.stdout


def test_bad_images_do_not_end_the_preview_of_imagenet(tmp_path: Path) -> None:
    for synset in ("n01440764", "n01443537"):
        (tmp_path / "train" / synset).mkdir(parents=True)
        (tmp_path / "train" / synset / "0.JPEG").write_bytes(b"text")
    done = kway_shard("imagenet", tmp_path, "--preview")
    assert done.exit_code == 0, done.exception
    assert "n01440764/0" in done.stdout


def test_the_preview_reads_label_vectors(images: Path, tmp_path: Path) -> None:
    vectors = tmp_path / "v.txt"
    vectors.write_text("apple 1 0\nbirne 3 2\ndate 0 5\n")
    done = kway_shard("imagefolder", images, "--preview", "--vectors", vectors)
    assert done.exit_code == 0, done.exception
    assert f"label vectors from {vectors}: 4 x 2" in done.stdout
    assert "1 classes without a vector use the mean: crème" in done.stdout
    vectors.write_text("")
    failed = kway_shard("imagefolder", images, "--preview", "--vectors", vectors)
    assert isinstance(failed.exception, ValueError)


def test_generated_sources_have_a_preview() -> None:
    for command in (
        ("glyphs", "--classes", 12, "--samples", 1, "--confusables", "keep"),
        ("emoji-names",),
    ):
        done = kway_shard(*command, "--preview")
        assert done.exit_code == 0, done.output
        assert "first 10 of " in done.stdout


def test_every_source_offers_a_preview() -> None:
    commands = get_command(app)
    others = {"verify", "show", "index", "check"}
    for name in set(commands.list_commands(None)) - others:  # type: ignore[attr-defined]
        options = {one.name for one in commands.get_command(None, name).params}  # type: ignore
        assert "preview" in options, name


def test_an_output_folder_is_required_without_a_preview(images: Path) -> None:
    failed = kway_shard("imagefolder", images)
    assert isinstance(failed.exception, ValueError)
    with pytest.raises(ValueError, match=r"-o/--out is missing: pass an output folder, or"):
        raise failed.exception
