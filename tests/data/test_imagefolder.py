"""Shards from folders of images."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from data.images.decode import decode
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.skipped import SKIPPED, Skipped
from data.sources import ImageFolder
from launch.commands.shard import app
from tests.data.conftest import write_image
from tests.faults.sitecustomize import error


def names(source: ImageFolder) -> dict[str, set[str]]:
    return {split: {task.path for task in tasks} for split, tasks in source.splits().items()}


def test_large_images_are_resized_and_small_images_keep_their_bytes(
    tmp_path: Path,
) -> None:
    write_image(tmp_path / "in/a/large.png", 0, 90, 60)
    write_image(tmp_path / "in/a/small.png", 1, 30, 31)
    write_image(tmp_path / "in/b/wide.png", 2, 50, 200)
    source = ImageFolder(tmp_path / "in", short_side=40, test_fraction=0)
    write_shards(source, tmp_path / "out", workers=1)
    with open_split(tmp_path / "out", "train") as split:
        found = {split.key(i): split.read(i) for i in range(len(split))}
    assert {key: extension for key, (_, extension, _) in found.items()} == {
        "a/large": "jpg",
        "a/small": "png",
        "b/wide": "jpg",
    }
    shapes = {key: decode(data, 3).shape for key, (data, _, _) in found.items()}
    assert shapes == {"a/large": (60, 40, 3), "a/small": (30, 31, 3), "b/wide": (40, 160, 3)}
    assert found["a/small"][0] == (tmp_path / "in/a/small.png").read_bytes()
    original = ImageFolder(tmp_path / "in", original=True, test_fraction=0)
    assert {original.render(t).extension for t in original.splits()["train"]} == {"png"}


def test_packing_preserves_colors(tmp_path: Path) -> None:
    (tmp_path / "in/red").mkdir(parents=True)
    image = np.zeros((80, 80, 3), np.uint8)
    image[:, :, 2] = 200  # OpenCV writes blue, green, red
    cv2.imwrite(str(tmp_path / "in/red/r.png"), image)
    write_image(tmp_path / "in/other/o.png", 0)
    source = ImageFolder(tmp_path / "in", short_side=40, test_fraction=0)
    task = next(t for t in source.splits()["train"] if t.path == "red/r.png")
    packed = Image.open(io.BytesIO(source.render(task).data)).convert("RGB")
    assert np.abs(np.asarray(packed).astype(int) - [200, 0, 0]).max() < 6


def test_the_hash_split_is_stable_and_keeps_a_training_image_per_class(tmp_path: Path) -> None:
    for c in range(30):
        for i in range(3):
            write_image(tmp_path / f"c{c}" / f"{i}.png", i)
    splits = names(ImageFolder(tmp_path, test_fraction=0.5))
    assert splits["train"].isdisjoint(splits["test"])
    assert {path.split("/")[0] for path in splits["train"]} == {f"c{c}" for c in range(30)}
    assert 20 < len(splits["test"]) < 60
    write_image(tmp_path / "c0" / "new.png", 9)
    again = names(ImageFolder(tmp_path, test_fraction=0.5))
    assert {p for p in again["test"] if "c0" not in p} == {
        p for p in splits["test"] if "c0" not in p
    }


@pytest.mark.parametrize(
    ("folders", "splits"),
    [
        (("train", "test"), {"train", "test"}),
        (("train", "val"), {"train", "test"}),
        (("Training", "valid"), {"train", "test"}),
        (("train", "dev", "test"), {"train", "test", "validation"}),
        (("train", "validation", "test"), {"train", "test", "validation"}),
    ],
)
def test_folders_named_like_splits_are_splits(
    tmp_path: Path, folders: tuple[str, ...], splits: set[str]
) -> None:
    for folder in folders:
        for name in "ab":
            write_image(tmp_path / folder / name / "0.png", 0)
    source = ImageFolder(tmp_path)
    assert names(source).keys() == splits
    assert [info.name for info in source.classes()] == ["a", "b"]


def test_a_class_without_training_images_raises(tmp_path: Path) -> None:
    for path in ("train/a", "train/b", "test/c"):
        write_image(tmp_path / path / "0.png", 0)
    with pytest.raises(ValueError, match="class 'c' has test images, but none in"):
        ImageFolder(tmp_path).classes()


def test_a_label_file_defines_the_classes(tmp_path: Path) -> None:
    for i in range(4):
        write_image(tmp_path / f"{i}.png", i)
    labels = tmp_path / "labels.csv"
    labels.write_text('file,class\n0.png,cat\n1.png,"dog, big"\n\n2.png,cat\n')
    source = ImageFolder(tmp_path, labels=labels, test_fraction=0)
    assert [info.name for info in source.classes()] == ["cat", "dog, big"]
    assert names(source)["train"] == {"0.png", "1.png", "2.png"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "0.png,cat\n1.png,dog\n0.png,dog\n",
            r"labels\.csv, line 3: '0\.png' is already listed on line 1",
        ),
        ("0.png,cat\n./0.png,cat\n", r"line 2: '\./0\.png' is already listed on line 1"),
        ("0.png\n", r"line 1: '0\.png' is not of the form file,class"),
        ("0.png,cat\n9.png,cat\n", r"line 2: '9\.png' is missing"),
        ("../secret.png,cat\n", r"line 1: '\.\./secret\.png' is outside"),
    ],
)
def test_an_invalid_label_file_raises_an_error_that_names_the_line(
    tmp_path: Path, lines: str, message: str
) -> None:
    for i in range(2):
        write_image(tmp_path / "in" / f"{i}.png", i)
    labels = tmp_path / "labels.csv"
    labels.write_text(lines)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        ImageFolder(tmp_path / "in", labels=labels).classes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'0.png,cat\n"1.png,' + b"x" * 200_000, r"line 2: field larger .*unclosed quote"),
        (b'0.png,cat\n"1.png,' + b"x\n" * 9_000, r"line 2: '1\.png,x\\nx.*…' is not of the form"),
        ("0.png,cat\n1.png,crème\n".encode("latin-1"), r"line 2 is not UTF-8 text"),
        (b"0.png,cat\n1\x00.png,cat\n", r"line 2: '1\\x00\.png' is missing"),
    ],
)
def test_an_unreadable_label_file_raises_a_short_one_line_error(
    tmp_path: Path, content: bytes, message: str
) -> None:
    write_image(tmp_path / "0.png", 0)
    labels = tmp_path / "labels.csv"
    labels.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=rf"labels\.csv, {message}") as error:
        ImageFolder(tmp_path, labels=labels).classes()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("header", ["File,Class", "FILE,CLASS"])
def test_the_header_of_a_label_file_may_be_capitalized(tmp_path: Path, header: str) -> None:
    for i in range(2):
        write_image(tmp_path / f"{i}.png", i)
    labels = tmp_path / "labels.csv"
    labels.write_text(f"{header}\n0.png,cat\n1.png,dog\n")
    assert names(ImageFolder(tmp_path, labels=labels))["train"] == {"0.png", "1.png"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"image,label\n0.png,cat\n", "line 1: 'image' is missing .*: if it is a header, write"),
        (b"image,label,fold\n0.png,cat,1\n", "line 1: 'image,label,fold' is not .* the header"),
        (b"0.png,cat\r1.png,dog\r", r"line 1 contains a carriage return \(CR\): save the file"),
    ],
)
def test_other_headers_and_line_endings_raise_an_error_with_a_hint(
    tmp_path: Path, content: bytes, message: str
) -> None:
    write_image(tmp_path / "0.png", 0)
    labels = tmp_path / "labels.csv"
    labels.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=rf"labels\.csv, {message}"):
        ImageFolder(tmp_path, labels=labels).classes()


def test_numbers_that_belong_to_class_names_raise_an_error_with_the_reason(tmp_path: Path) -> None:
    write_image(tmp_path / "0.png", 0)
    (tmp_path / "labels.csv").write_text("0.png,0\n")
    (tmp_path / "names").write_text("class 0\nclass 1\n")
    source = ImageFolder(tmp_path, labels=tmp_path / "labels.csv", class_names=tmp_path / "names")
    with pytest.raises(ValueError, match=r"names, line 2: 'class' .* its number: .* class_0"):
        source.classes()


def test_images_that_no_label_file_lists_are_reported(tmp_path: Path) -> None:
    for name in ("0", "1", "2", "more/3", ".hidden/4"):
        write_image(tmp_path / "in" / f"{name}.png", 0)
    (tmp_path / "in/labels.csv").write_text("0.png,cat\n1.png,dog\n")
    source = ImageFolder(tmp_path / "in", labels=tmp_path / "in/labels.csv")
    reason = "no label or annotation file lists it"
    assert source.skipped() == [("2.png", reason), ("more/3.png", reason)]
    assert source.notes() == [f"skipped '2.png', 'more/3.png': {reason}"]


def test_listed_images_may_be_links_outside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i in range(2):
        write_image(tmp_path / "elsewhere" / f"{i}.png", i)
        (tmp_path / "in" / f"{i}.png").symlink_to(tmp_path / "elsewhere" / f"{i}.png")
    labels = tmp_path / "labels.csv"
    labels.write_text("0.png,cat\n1.png,dog\n")
    source = ImageFolder(tmp_path / "in", labels=labels)
    assert names(source)["train"] == {"0.png", "1.png"}


def test_every_file_that_is_not_read_is_reported_with_the_reason(tmp_path: Path) -> None:
    write_image(tmp_path / "in" / "a" / "0.png", 0)
    write_image(tmp_path / "elsewhere" / "deep" / "0.png", 1)
    (tmp_path / "elsewhere" / "notes.txt").write_text("")
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "a" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "a" / "x.jpg").symlink_to(tmp_path / "gone.jpg")
    for loose in ("1.png", "2.png", ".hidden/0.png"):
        write_image(tmp_path / "in" / loose, 2)
    (tmp_path / "in" / "README").write_text("")
    (tmp_path / "in" / "bare").mkdir()
    (tmp_path / "in" / "lost").symlink_to(tmp_path / "gone")
    source = ImageFolder(tmp_path / "in", test_fraction=0)
    assert names(source) == {"train": {"a/0.png", "linked/deep/0.png"}}
    assert dict(source.skipped()) == {
        ".hidden": "hidden folder",
        "1.png": "outside the class folders",
        "2.png": "outside the class folders",
        "README": "outside the class folders",
        "lost": "broken symbolic link",
        "a/more": "link to a folder below a class folder",
        "a/x.jpg": "broken symbolic link",
        "bare": "class folder without images",
        "linked/notes.txt": "its name does not end in .bmp, .gif, .jpeg, .jpg, .png, .webp",
    }
    assert "skipped '1.png', '2.png', 'README': outside the class folders" in source.notes()


def test_an_unreadable_folder_raises(tmp_path: Path, injected: Callable[..., None]) -> None:
    for name in ("a/0.png", "a/deep/0.png", "b/0.png", "lost+found/0.png"):
        write_image(tmp_path / name, 0)
    injected("scandir", "lost+found", error("EACCES"))
    assert dict(ImageFolder(tmp_path).skipped()) == {"lost+found": "hidden folder"}
    injected("scandir", "a/deep", error("EACCES"))
    with pytest.raises(PermissionError):
        ImageFolder(tmp_path).classes()


def test_skipped_images_and_ignored_files_are_listed_next_to_the_shards(tmp_path: Path) -> None:
    write_image(tmp_path / "in" / "a" / "0.png", 0)
    write_image(tmp_path / "in" / "b" / "0.png", 1)
    (tmp_path / "in" / "a" / "x.jpg").symlink_to(tmp_path / "gone.jpg")
    (tmp_path / "in" / "b" / "bad.png").write_bytes(b"this is text")
    command = ("imagefolder", tmp_path / "in", "-o", tmp_path / "out")
    for _ in range(2):  # the second run finds complete shards
        done = CliRunner().invoke(app, [*map(str, command), "--skip-bad", "--test-fraction=0"])
        assert done.exit_code == 0, done.output
        assert str(tmp_path / "out" / SKIPPED) in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / SKIPPED).read_text().splitlines()]
    assert lines[0] == {"name": "a/x.jpg", "reason": "broken symbolic link"}
    assert (lines[1]["shard"], lines[1]["name"]) == ("train-000000.tar", "b/bad.png")
    assert lines[1]["reason"].startswith("not an image")
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("train/a", "train/b", "val/a", "dev/a"), "dev/ and val/ for split validation"),
        (("train/a", "train/b"), "train looks like a split"),
        (("valid/a", "valid/b"), "valid looks like a split"),
        (("train", "valid"), "train does not contain class folders"),
        (("eval/a", "a", "b"), "eval looks like a split"),
    ],
)
def test_folders_that_look_like_splits_raise(
    tmp_path: Path, paths: tuple[str, ...], message: str
) -> None:
    for path in paths:
        write_image(tmp_path / path / "0.png", 0)
    with pytest.raises(ValueError, match=message):
        ImageFolder(tmp_path).classes()


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("bus", "train"):
        write_image(tmp_path / name / "0.png", 0)
    assert [info.name for info in ImageFolder(tmp_path).classes()] == ["bus", "train"]


def test_a_test_folder_without_images_raises(tmp_path: Path) -> None:
    for name in "ab":
        write_image(tmp_path / "train" / name / "0.png", 0)
    (tmp_path / "test" / "a").mkdir(parents=True)
    with pytest.raises(ValueError, match="test does not contain class folders"):
        ImageFolder(tmp_path).classes()


def test_other_entries_beside_the_split_folders_are_reported(tmp_path: Path) -> None:
    for path in ("train/a", "train/b", "test/a", "extra/a"):
        write_image(tmp_path / path / "0.png", 0)
    write_image(tmp_path / "loose.png", 0)
    (tmp_path / "val").symlink_to(tmp_path / "gone")
    assert dict(ImageFolder(tmp_path).skipped()) == {
        "extra": "folder next to train/ that is not a split",
        "loose.png": "outside the class folders",
        "val": "broken symbolic link",
    }


def test_a_class_name_that_is_not_utf8_raises(tmp_path: Path) -> None:
    write_image(tmp_path / "a" / "0.png", 0)
    write_image(tmp_path / "b" / "0.png", 0)
    (tmp_path / "b").rename(tmp_path / "cr\udce8me")
    with pytest.raises(ValueError, match=r"'cr\\udce8me' is not UTF-8: rename it"):
        ImageFolder(tmp_path).classes()


def test_a_folder_without_classes_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        ImageFolder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="contains no class with images"):
        ImageFolder(tmp_path).classes()


def test_keys_are_unique_and_short_and_contain_no_dots(tmp_path: Path) -> None:
    long = "x" * 120
    for name in ("p.png", "p.jpg", "p.q.png", "p_q.png", f"{long}.png", "üñí.png"):
        write_image(tmp_path / "a" / name, 0)
    write_image(tmp_path / "b" / "p.png", 0)
    source = ImageFolder(tmp_path, test_fraction=0)
    keys = [task.key for task in source.splits()["train"]]
    assert len(set(keys)) == 7
    assert not any("." in key for key in keys)
    assert all(len(key.encode()) < 100 for key in keys)
    assert {"a/üñí", "b/p"} <= set(keys)
    written = write_shards(source, tmp_path / "out", workers=1)
    with open_split(tmp_path / "out", "train") as split:
        assert {split.key(i) for i in range(len(split))} == set(keys)
    assert written.num_skipped == 0


def test_nested_folders_become_classes_with_their_parent_folders_as_path(tmp_path: Path) -> None:
    folders = ("animal/dog/poodle", "animal/dog", "animal/other/fish", "other/oak")
    for i, folder in enumerate(folders):
        for split in ("train", "test"):
            write_image(tmp_path / split / folder / f"{split}.png", i)
    source = ImageFolder(tmp_path, class_from="leaf")
    assert {info.name: info.attributes for info in source.classes()} == {
        "dog": {"path": "animal > dog"},
        "fish": {"path": "animal > other"},
        "oak": {"path": "other"},
        "poodle": {"path": "animal > dog"},
    }
    of = {task.path: source.classes()[task.label].name for task in source.splits()["train"]}
    assert of["train/animal/dog/poodle/train.png"] == "poodle"
    assert of["train/animal/dog/train.png"] == "dog"
    topmost = ImageFolder(tmp_path, class_from="1")
    assert [info.name for info in topmost.classes()] == ["animal", "other"]


@pytest.fixture
def omniglot(tmp_path: Path) -> Path:
    """Write Omniglot's layout: two folders of alphabets whose characters share names."""
    for folder in ("images_background/Greek", "images_background/Latin", "images_evaluation/Oriya"):
        for character in ("character01", "character02"):
            write_image(tmp_path / "in" / folder / character / "0.png", len(folder))
    return tmp_path / "in"


def test_ambiguous_levels_raise_an_error_that_lists_levels_and_counts(omniglot: Path) -> None:
    with pytest.raises(ValueError, match="has images at several folder levels") as error:
        ImageFolder(omniglot).classes()
    assert (
        "(level 1: 2 folders with 0 images; level 2: 3 folders with 0 images; "
        "level 3: 6 folders with 6 images)"
    ) in str(error.value)
    assert "pass --class-from path for one class per folder with images (6)" in str(error.value)
    assert "--class-from 1 for one class per topmost folder (2)" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_level_of_the_classes_can_be_selected(omniglot: Path, tmp_path: Path) -> None:
    for level, classes in (("1", 2), ("2", 3), ("-1", 2), ("-2", 3), ("leaf", 6), ("path", 6)):
        out = tmp_path / level
        options = ("--test-fraction=0", f"--class-from={level}")
        command = ("imagefolder", omniglot, "-o", out, *options)
        done = CliRunner().invoke(app, [str(argument) for argument in command])
        assert done.exit_code == 0, done.output
        assert f"{classes} classes" in done.stdout


def test_one_folder_of_images_in_each_class_folder_is_not_ambiguous(tmp_path: Path) -> None:
    for name in "ab":
        write_image(tmp_path / name / "images" / "0.png", 0)
        write_image(tmp_path / name / ".thumbnails" / "0.png", 0)
    source = ImageFolder(tmp_path)
    assert [info.name for info in source.classes()] == ["a", "b"]
    assert Skipped("a/.thumbnails", "hidden folder") in source.skipped()


def test_class_folders_with_the_same_name_are_named_by_their_paths(tmp_path: Path) -> None:
    for i, folder in enumerate(("left/hand", "right/hand", "right/foot", "right/hand/glove")):
        for split in ("train", "test"):
            write_image(tmp_path / split / folder / "0.png", i)
    source = ImageFolder(tmp_path, class_from="leaf")
    assert {info.name: info.attributes for info in source.classes()} == {
        "left/hand": {"path": "left"},
        "right/hand": {"path": "right > hand"},
        "foot": {"path": "right"},
        "glove": {"path": "right > hand"},
    }


def test_the_n_th_folder_merges_equal_names_and_skips_images_above_it(tmp_path: Path) -> None:
    for path in ("s1/cat/0", "s2/cat/x/0", "s1/dog/0", "s1/loose"):
        write_image(tmp_path / f"{path}.png", 0)
    source = ImageFolder(tmp_path, class_from="2", test_fraction=0)
    assert {info.name: info.attributes for info in source.classes()} == {
        "cat": {},  # its two folders have different parents
        "dog": {"path": "s1"},
    }
    assert dict(source.skipped()) == {
        "s1/loose.png": "it has too few folders above it for --class-from 2"
    }
    with pytest.raises(ValueError, match="class_from\n  String should match pattern"):
        ImageFolder(tmp_path, class_from="0")


def test_class_from_cannot_be_combined_with_labels(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="defines the classes: omit --class-from"):
        ImageFolder(tmp_path, class_from="leaf", labels=tmp_path / "l.csv")
