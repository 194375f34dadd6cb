"""Shards from folders of images."""

from collections.abc import Callable
from pathlib import Path

import pytest

from data.images.decode import decode
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.skipped import Skipped, by_reason
from data.sources import ImageFolder
from tests.data.conftest import write_image
from tests.file_errors import error


def write_folders(root: Path, *folders: str) -> None:
    """Write an image to each folder."""
    for path in folders:
        write_image(root / path / "0.png", 0)


def names(source: ImageFolder) -> dict[str, set[str]]:
    return {split: {task.path for task in tasks} for split, tasks in source.splits().items()}


def test_large_images_are_resized_and_small_images_keep_their_bytes(tmp_path: Path) -> None:
    write_image(tmp_path / "in/a/large.png", 0, 90, 60)
    write_image(tmp_path / "in/a/small.png", 1, 30, 31)
    (tmp_path / "in/a/small.png").rename(tmp_path / "in/a/small.jpg")  # the bytes are still PNG
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
    assert found["a/small"][0] == (tmp_path / "in/a/small.jpg").read_bytes()
    original = ImageFolder(tmp_path / "in", original=True, test_fraction=0)
    assert {original.render(t).extension for t in original.splits()["train"]} == {"png"}


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
    assert "skipped '1.png', '2.png', 'README': outside the class folders" in by_reason(
        source.skipped()
    )


def test_an_unreadable_folder_raises(tmp_path: Path, injected: Callable[..., None]) -> None:
    for name in ("a/0.png", "a/deep/0.png", "b/0.png", "lost+found/0.png"):
        write_image(tmp_path / name, 0)
    injected("scandir", "lost+found", error("EACCES"))
    assert dict(ImageFolder(tmp_path).skipped()) == {"lost+found": "hidden folder"}
    injected("scandir", "a/deep", error("EACCES"))
    with pytest.raises(PermissionError):
        ImageFolder(tmp_path).classes()


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("train/a", "train/b", "val/a", "dev/a"), "dev looks like a split"),
        (("valid/a", "valid/b"), "valid looks like a split"),
        (("train", "valid"), "train has no classes"),
        (("eval/a", "a", "b"), "eval looks like a split"),
        (("TrainImages", "TestImages"), "TestImages looks like a split"),
        (("train/a", "train/b", "test/a", "test/c"), "class 'c' has test images, but none in"),
        (("Greek/omega", "Greek/rho", "Latin/a"), r"such as omega and rho: .*layouts\.md"),
    ],
)
def test_folders_from_which_classes_and_splits_cannot_be_told_raise(
    tmp_path: Path, paths: tuple[str, ...], message: str
) -> None:
    write_folders(tmp_path, *paths)
    with pytest.raises(ValueError, match=message):
        ImageFolder(tmp_path).classes()


def test_other_entries_beside_the_split_folders_are_reported(tmp_path: Path) -> None:
    write_folders(tmp_path, "train/a", "train/b", "test/a", "extra/a")
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


def test_one_folder_of_images_in_each_class_folder_is_not_ambiguous(tmp_path: Path) -> None:
    for name in "ab":
        write_image(tmp_path / name / "images" / "0.png", 0)
        write_image(tmp_path / name / ".thumbnails" / "0.png", 0)
    source = ImageFolder(tmp_path)
    assert [info.name for info in source.classes()] == ["a", "b"]
    assert Skipped("a/.thumbnails", "hidden folder") in source.skipped()


def test_folders_that_look_like_splits_can_be_stated_to_be_classes(tmp_path: Path) -> None:
    for name in ("bullet train", "test tube"):
        write_image(tmp_path / name / "0.png", 0)
    with pytest.raises(ValueError, match="or --no-splits if the subfolders are classes"):
        ImageFolder(tmp_path).classes()
    source = ImageFolder(tmp_path, has_splits=False)
    assert [info.name for info in source.classes()] == ["bullet train", "test tube"]
