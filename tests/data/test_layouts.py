"""Published layouts of image data sets, each sharded with a single command."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from data.shards.manifest import Manifest
from data.shards.split import open_split
from data.skipped import SKIPPED
from data.sources import ImageFolder
from launch.commands.shard import app
from tests.data.conftest import write_image


def kway_shard(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def written(out: Path) -> dict[str, dict[str, str]]:
    """Return the class of each key, by split."""
    found = {}
    for name in Manifest.load(out).splits:
        with open_split(out, name) as split:
            labels = {split.key(i): split.read(i)[2] for i in range(len(split))}
            found[name] = {key: split.classes[label].name for key, label in labels.items()}
    return found


def lines(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


@pytest.fixture
def tiny_imagenet(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-imagenet-200"
    for number, synset in enumerate(("n01", "n02")):
        for i in range(2):
            path = folder / "train" / synset / "images" / f"{synset}_{i}.JPEG"
            write_image(path.with_suffix(".jpg"), 10 * number + i)
            path.with_suffix(".jpg").rename(path)
        lines(folder / "train" / synset / f"{synset}_boxes.txt", f"{synset}_0.JPEG\t0\t0\t9\t9")
    for split in ("val", "test"):
        for i in range(2):
            write_image(folder / split / "images" / f"{split}_{i}.png", 50 + i)
    boxes = "0\t32\t44\t62"
    lines(
        folder / "val" / "val_annotations.txt",
        f"val_0.png\tn02\t{boxes}",
        f"val_1.png\tn01\t{boxes}",
    )
    lines(folder / "wnids.txt", "n01", "n02")
    return folder


def test_tiny_imagenet_is_sharded_with_one_command(tiny_imagenet: Path, tmp_path: Path) -> None:
    labels = tiny_imagenet / "val" / "val_annotations.txt"
    plain = kway_shard("imagefolder", tiny_imagenet, "-o", tmp_path / "out")
    assert f"--split-labels val={labels}" in str(plain.exception)
    done = kway_shard(
        "imagefolder", tiny_imagenet, "-o", tmp_path / "out", "--split-labels", f"val={labels}"
    )
    assert done.exit_code == 0, done.output
    found = written(tmp_path / "out")
    assert found["test"] == {"val/images/val_0": "n02", "val/images/val_1": "n01"}
    assert len(found["train"]) == 4
    assert found["train"]["train/n01/images/n01_0"] == "n01"
    skipped = [json.loads(line) for line in (tmp_path / "out" / SKIPPED).read_text().splitlines()]
    assert {one["name"] for one in skipped} == {
        "test",
        "train/n01/n01_boxes.txt",
        "train/n02/n02_boxes.txt",
        "wnids.txt",
    }
    assert "held-out split without labels" in done.stderr


def test_omniglot_is_sharded_with_one_command(tmp_path: Path) -> None:
    for folder in ("images_background/Greek", "images_background/Latin", "images_evaluation/Oriya"):
        for character in ("character01", "character02"):
            for i in range(2):
                write_image(tmp_path / "in" / folder / character / f"0{i}.png", i)
    lines(tmp_path / "in/strokes_background/Greek/character01/00.txt", "stroke")
    done = kway_shard(
        "imagefolder", tmp_path / "in", "-o", tmp_path / "out", "--class-from", "path"
    )
    assert done.exit_code == 0, done.output
    manifest = Manifest.load(tmp_path / "out")
    assert len(manifest.classes) == 6
    assert manifest.classes[0].name == "images_background/Greek/character01"
    assert manifest.classes[0].attributes == {"path": "images_background > Greek"}


@pytest.mark.parametrize("slash", ["", "/"])
def test_places_is_sharded_with_one_command(tmp_path: Path, slash: str) -> None:
    folder = tmp_path / "places365"
    for i, path in enumerate(("a/airfield/1", "z/zoo/2", "z/zoo/3")):
        write_image(folder / "data_256" / f"{path}.png", i)
    write_image(folder / "val_256" / "Places365_val_1.png", 9)
    train = lines(
        folder / "places365_train_standard.txt",
        f"{slash}a/airfield/1.png 0",
        f"{slash}z/zoo/2.png 1",
        f"{slash}z/zoo/3.png 1",
    )
    val = lines(folder / "places365_val.txt", "Places365_val_1.png 1")
    names = lines(folder / "categories_places365.txt", "/z/zoo 1", "/a/airfield 0", "/y/yard 2")
    done = kway_shard(
        "imagefolder", folder, "-o", tmp_path / "out", "--class-names", names,
        "--split-labels", f"train={train}", "--split-labels", f"val={val}",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "1 classes in" in done.stderr
    assert written(tmp_path / "out") == {
        "train": {
            "data_256/a/airfield/1": "/a/airfield",
            "data_256/z/zoo/2": "/z/zoo",
            "data_256/z/zoo/3": "/z/zoo",
        },
        "test": {"val_256/Places365_val_1": "/z/zoo"},
    }


def test_a_label_file_can_define_the_split(tmp_path: Path) -> None:
    for i in range(4):
        write_image(tmp_path / "in/pictures" / f"{i} a.png", i)
    for separator in ",\t":
        labels = tmp_path / "labels.csv"
        rows = ["file,class,split", "0 a.png,x,train", "1 a.png,y,train", "2 a.png,x,val"]
        lines(labels, *(row.replace(",", separator) for row in [*rows, "", "3 a.png,y,test"]))
        source = ImageFolder(tmp_path / "in", labels=labels)
        found = {name: {task.path for task in tasks} for name, tasks in source.splits().items()}
        assert found == {
            "train": {"pictures/0 a.png", "pictures/1 a.png"},
            "validation": {"pictures/2 a.png"},
            "test": {"pictures/3 a.png"},
        }


def test_a_list_may_contain_paths_with_spaces(tmp_path: Path) -> None:
    for i in range(2):
        write_image(tmp_path / "in" / f"{i} a.png", i)
    labels = lines(tmp_path / "list.txt", "0 a.png 7", "1 a.png 8")
    assert [info.name for info in ImageFolder(tmp_path / "in", labels=labels).classes()] == [
        "7",
        "8",
    ]


@pytest.fixture
def split_folder(tmp_path: Path) -> Path:
    for path in ("train/a/0", "train/b/1", "val/2", "val/3"):
        write_image(tmp_path / "in" / f"{path}.png", len(path))
    write_image(tmp_path / "secret.png", 0)
    return tmp_path / "in"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("2.png\ta", "9.png\tb"), r"val\.txt, line 2: 'val/9\.png' is missing from .*: add it"),
        (("2.png\ta", "3.png\tc"), r"line 2: class 'c' has no training images: correct the label"),
        (("2.png\ta", "2.png\tb"), r"line 2: '2\.png' is already listed on line 1: remove"),
        (("2.png\ta", "../../secret.png\ta"), r"line 2: '.*secret\.png' is outside .*: use files"),
        (("2.png\ta", "/../../secret.png\ta"), r"line 2: '.*secret\.png' is outside"),
        (("2.png\ta", "3.png"), r"line 2: '3\.png' is not of the form file,class: correct it"),
        (("../train/a/0.png\tb", "2.png\ta"), r"line 1: .* is also in a class folder of another"),
    ],
)
def test_an_invalid_label_file_of_a_split_names_the_file_the_line_and_the_fix(
    split_folder: Path, tmp_path: Path, rows: tuple[str, ...], message: str
) -> None:
    labels = lines(tmp_path / "val.txt", *rows)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        ImageFolder(split_folder, split_labels={"val": labels}).classes()
    assert str(labels) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_image_in_two_label_files_names_both_lines(split_folder: Path, tmp_path: Path) -> None:
    train = lines(tmp_path / "train.txt", "train/a/0.png a", "train/b/1.png b", "val/2.png b")
    val = lines(tmp_path / "val.txt", "val/3.png a", "val/2.png b")
    with pytest.raises(ValueError, match=r"val\.txt, line 2: .* listed in .*train\.txt, line 3"):
        ImageFolder(split_folder, split_labels={"train": train, "val": val}).classes()


def test_missing_listed_images_can_be_skipped(split_folder: Path, tmp_path: Path) -> None:
    labels = lines(tmp_path / "val.txt", "2.png\ta", "9.png\tb")
    source = ImageFolder(split_folder, split_labels={"val": labels}, skip_bad=True)
    assert {task.path for task in source.splits()["test"]} == {"val/2.png"}
    assert ("val/9.png", "listed in val.txt, but missing") in source.skipped()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a 0", "b 1"), r"val\.txt, line 1: label '2' is not one of the 2 classes in"),
        (("a", "b", "a"), r"names\.txt, line 3: 'a' is also on line 1"),
        ((), r"names\.txt is empty"),
    ],
)
def test_unknown_labels_and_invalid_class_names_raise(
    split_folder: Path, tmp_path: Path, names: tuple[str, ...], message: str
) -> None:
    listed = lines(tmp_path / "names.txt", *names)
    labels = lines(tmp_path / "val.txt", "2.png 2", "3.png 1")
    with pytest.raises(ValueError, match=message):
        ImageFolder(split_folder, split_labels={"val": labels}, class_names=listed).classes()


def test_numbered_labels_name_class_folders(split_folder: Path, tmp_path: Path) -> None:
    listed = lines(tmp_path / "names.txt", "b", "a")
    labels = lines(tmp_path / "val.txt", "2.png 0", "3.png 1")
    source = ImageFolder(split_folder, split_labels={"val": labels}, class_names=listed)
    assert [info.name for info in source.classes()] == ["b", "a"]
    assert {task.path: task.label for task in source.splits()["test"]} == {
        "val/2.png": 0,
        "val/3.png": 1,
    }


def test_an_ambiguous_location_of_listed_images_raises(split_folder: Path, tmp_path: Path) -> None:
    for folder in ("large", "small"):
        for i in range(2):
            write_image(split_folder / folder / f"x{i}.png", i)
    labels = lines(tmp_path / "list.txt", "x0.png a", "x1.png b")
    with pytest.raises(ValueError, match=r"list\.txt: its images are in both .*large and .*small"):
        ImageFolder(split_folder, labels=labels).classes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "l.txt", "split_labels": {"val": "l.txt"}}, "either --labels or"),
        ({"class_names": "l.txt"}, "pass --labels or --split-labels"),
        ({"split_labels": {"val": "l.txt", "dev": "l.txt"}}, "split validation is given twice"),
        ({"split_labels": {"../x": "l.txt"}}, r"'\.\./x' cannot be the name of a split"),
        ({"split_labels": {"val": "gone.txt"}}, r"gone\.txt is not a file: pass a text file"),
    ],
)
def test_inconsistent_label_options_raise(
    split_folder: Path, tmp_path: Path, options: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "l.txt", "val/2.png a")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        ImageFolder(split_folder, **options).classes()


def test_split_labels_require_training_folders_or_labels(tmp_path: Path) -> None:
    write_image(tmp_path / "in/val/0.png", 0)
    labels = lines(tmp_path / "val.txt", "0.png a")
    with pytest.raises(ValueError, match=r"does not contain a folder train/ .*train=FILE"):
        ImageFolder(tmp_path / "in", split_labels={"val": labels}).classes()
