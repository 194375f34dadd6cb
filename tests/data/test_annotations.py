"""Images with JSON annotations in the format of COCO and iNaturalist."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from data.shards.manifest import Manifest
from data.shards.writing.writer import write_shards
from data.skipped import SKIPPED
from data.sources import AnnotatedImages
from data.sources.layouts import coco
from launch.commands.shard import app
from tests.data.conftest import write_image

CATEGORIES = [
    {"id": 18, "name": "dog", "supercategory": "animal"},
    {"id": 1, "name": "person", "supercategory": "person"},
    {"id": 90, "name": "toothbrush", "supercategory": "none"},
]


def image(number: int, name: str | None = None) -> dict[str, Any]:
    return {"id": number, "file_name": name or f"{number:03d}.png", "license": 1}


def box(image_id: int, category: int, area: float = 1) -> dict[str, Any]:
    return {"image_id": image_id, "category_id": category, "area": area, "iscrowd": 0}


def coco_json(path: Path, images: list, annotations: list, categories: Any = CATEGORIES) -> Path:
    content = {"info": {}, "images": images, "annotations": annotations, "categories": categories}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write COCO's layout: train2017/, val2017/ and annotations/."""
    for i in range(4):
        write_image(tmp_path / "coco" / "train2017" / f"{i:03d}.png", i)
    for i in range(4, 7):
        write_image(tmp_path / "coco" / "val2017" / f"{i:03d}.png", i)
    annotations = [box(0, 18), box(0, 18), box(1, 1), box(2, 1, 5), box(2, 18, 7)]
    coco_json(tmp_path / "coco/annotations/train.json", [image(i) for i in range(4)], annotations)
    annotations = [box(4, 18), box(5, 1), box(6, 90)]
    coco_json(tmp_path / "coco/annotations/val.json", [image(i) for i in (4, 5, 6)], annotations)
    return tmp_path / "coco"


def source(folder: Path, *names: str, **options: Any) -> AnnotatedImages:
    files = {name: folder / "annotations" / f"{name}.json" for name in names or ("train", "val")}
    return AnnotatedImages(folder, files, **options)


def labeled(found: AnnotatedImages) -> dict[str, dict[str, str]]:
    names = [info.name for info in found.classes()]
    return {
        split: {task.path: names[task.label] for task in tasks}
        for split, tasks in found.splits().items()
    }


def test_coco_is_sharded_with_one_command(folder: Path, tmp_path: Path) -> None:
    command = ["annotations", folder, "-o", tmp_path / "out"]
    for name in ("train", "val"):
        command += ["--annotations", f"{name}={folder}/annotations/{name}.json"]
    done = CliRunner().invoke(app, [str(argument) for argument in command])
    assert done.exit_code == 0, done.output
    assert "2 train + 2 test samples, 2 classes" in done.stdout
    manifest = Manifest.load(tmp_path / "out")
    assert [(one.name, one.attributes) for one in manifest.classes] == [
        ("dog", {"path": "animal"}),
        ("person", {"path": "person"}),
    ]
    skipped = [json.loads(line) for line in (tmp_path / "out" / SKIPPED).read_text().splitlines()]
    assert {one["name"]: one["reason"] for one in skipped} == {
        "train2017/002.png": "annotated with several categories (--several skip)",
        "train2017/003.png": "no annotation",
        "val2017/006.png": "its category has no training images",
    }
    assert "1 categories have no images and are omitted" in done.stderr


def test_the_largest_annotation_can_define_the_class(folder: Path) -> None:
    found = labeled(source(folder, several="largest"))
    assert found == {
        "train": {
            "train2017/000.png": "dog",
            "train2017/001.png": "person",
            "train2017/002.png": "dog",
        },
        "test": {"val2017/004.png": "dog", "val2017/005.png": "person"},
    }


def test_the_area_of_a_box_is_used_if_there_is_no_other(folder: Path) -> None:
    boxes = [
        box(0, 18),
        box(1, 1),
        {"image_id": 2, "category_id": 18, "bbox": [0, 0, 2, 3]},
        {"image_id": 2, "category_id": 1, "bbox": [0, 0, 3, 3]},
    ]
    coco_json(folder / "annotations/train.json", [image(i) for i in range(4)], boxes)
    assert labeled(source(folder, several="largest"))["train"]["train2017/002.png"] == "person"
    del boxes[3]["bbox"]
    coco_json(folder / "annotations/train.json", [image(i) for i in range(4)], boxes)
    with pytest.raises(ValueError, match=r"annotations\[3\] has neither an area nor a box: omit"):
        source(folder, several="largest").classes()


def test_the_ranks_of_inaturalist_are_the_hierarchy(tmp_path: Path) -> None:
    names = [f"train_val2019/Aves/{i}/x.png" for i in range(4)]
    for i, name in enumerate(names):
        write_image(tmp_path / name, i)
    ranks = {"kingdom": "Animalia", "phylum": "Chordata", "class": "Aves", "genus": "Corvus"}
    categories = [
        {
            "id": 0,
            "name": "Corvus corax",
            "common_name": "Raven",
            "supercategory": "Birds",
            **ranks,
        },
        {"id": 1, "name": "Corvus corone", "supercategory": "Birds", **ranks},
    ]
    annotations = [{"id": i, "image_id": i, "category_id": i % 2} for i in range(4)]
    images = [image(i, name) for i, name in enumerate(names)]
    coco_json(tmp_path / "annotations/train.json", images, annotations, categories)
    found = source(tmp_path, "train", test_fraction=0)
    path = "Animalia > Chordata > Aves > Corvus"
    assert [info.attributes for info in found.classes()] == [
        {"path": path, "words": "Raven, Corvus corax"},
        {"path": path},
    ]
    assert len(found.splits()["train"]) == 4
    held_out = source(tmp_path, "train", test_fraction=0.99)
    assert {split: len(tasks) for split, tasks in held_out.splits().items()} == {
        "train": 2,
        "test": 2,
    }


def test_a_missing_image_is_an_error_or_skipped(folder: Path) -> None:
    (folder / "train2017/001.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"train\.json, image 1: '.*001\.png' is missing"):
        source(folder).classes()
    (folder / "train2017/002.png").unlink()
    (folder / "val2017/004.png").unlink()
    coco_json(
        folder / "annotations/train.json",
        [image(i) for i in range(4)],
        [box(0, 18), box(1, 1), box(3, 1)],
    )
    found = source(folder, skip_bad=True)
    assert labeled(found)["test"] == {"val2017/005.png": "person"}
    assert ("train2017/001.png", "in train.json, but missing") in found.skipped()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": [image(0, "../secret.png")]}, r"image 0: '\.\./secret\.png' is outside"),
        ({"images": [image(0, "/../../secret.png")]}, r"image 0: .* is outside"),
        ({"images": [image(0), image(0)]}, r"images\[1\]: ID 0 is already used"),
        ({"images": [image(0), image(9, "000.png")]}, r"image 9: '000\.png' is also an image in"),
        ({"images": [{"id": 0}]}, r"images\[0\]: 'file_name' is None: it must be a text"),
        ({"images": [{"id": [], "file_name": "a"}]}, r"images\[0\]: 'id' is \[\]"),
        ({"images": [image(0, "\ud800.png")]}, r"images\[0\]: 'file_name' is .*must be a text"),
        ({"images": ["a"]}, r"images\[0\] is not a JSON object"),
        ({"images": {}}, "does not contain a list 'images': pass a file with images"),
        ({"annotations": []}, "does not contain a list 'annotations'"),
        ({"annotations": [box(77, 1)]}, r"annotations\[0\]: image 77 is not in `images`"),
        ({"annotations": [box(0, 5)]}, r"annotations\[0\]: category 5 is not in `categories`"),
        ({"categories": [*CATEGORIES, CATEGORIES[0]]}, r"categories\[3\]: ID 18 is already"),
        ({"categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "a"}]}, "are both called 'a'"),
        (
            {"categories": [{"id": i, "name": f"c{i}"} for i in (18, 1, 90)]},
            r"val\.json: category \d+ is '\w+', but 'c\d+' in .*train\.json",
        ),
    ],
)
def test_malformed_annotations_name_the_file_the_entry_and_the_fix(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    path = folder / "annotations/train.json"
    content = json.loads(path.read_text()) | change
    if "images" in change and isinstance(change["images"], list):
        content["annotations"] = [box(0, 18)]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as error:
        source(folder).classes()
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "is nested too deeply"),
        (b'{"images": [', "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"images": [{"id": 1' + b"0" * 5000 + b"}]}", "is not valid JSON"),
    ],
)
def test_files_that_are_not_annotations_raise(folder: Path, content: bytes, message: str) -> None:
    (folder / "annotations/train.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"train\.json.* {message}") as error:
        source(folder).classes()
    assert "\n" not in str(error.value)


def test_a_file_above_the_size_limit_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coco, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="but the limit is 100: remove fields"):
        source(folder).classes()


def test_an_image_in_two_splits_raises(folder: Path) -> None:
    coco_json(folder / "annotations/val.json", [image(0, "train2017/000.png")], [box(0, 1)])
    with pytest.raises(ValueError, match=r"val\.json, image 0: .* is also an image in .*train"):
        source(folder).classes()


@pytest.mark.parametrize(
    ("names", "message"),
    [(("val",), "pass --annotations train=FILE"), (("train", "val", "dev"), "is given twice")],
)
def test_inconsistent_splits_raise(folder: Path, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        source(folder, *names)


def test_a_missing_annotation_file_raises(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.json is not a file: pass a JSON file"):
        source(folder, "train", "gone").classes()


def test_a_split_cannot_be_written_outside_the_folder(folder: Path) -> None:
    files = {"train": folder / "annotations/train.json", "../x": folder / "annotations/val.json"}
    with pytest.raises(ValueError, match=r"'\.\./x' cannot be the name of a split"):
        AnnotatedImages(folder, files)


def test_shards_are_not_resumed_with_classes_in_another_order(folder: Path, tmp_path: Path) -> None:
    write_shards(source(folder), tmp_path / "out")
    for name in ("train", "val"):
        path = folder / "annotations" / f"{name}.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "categories": content["categories"][::-1]}))
    with pytest.raises(ValueError, match="classes"):
        write_shards(source(folder), tmp_path / "out")


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_an_area_that_is_no_float_is_an_error_in_one_line(folder: Path, number: int) -> None:
    path = folder / "annotations" / "train.json"
    coco_json(path, [image(i) for i in range(4)], [box(0, 18, number), box(1, 1)])
    assert source(folder, "train").splits()["train"]
    with pytest.raises(ValueError, match="neither an area nor a box"):
        source(folder, "train", several="largest").splits()


def test_images_without_annotations_file_are_reported(folder: Path) -> None:
    found = source(folder, "train")
    assert [one for one in found.skipped() if "lists it" in one.reason] == [
        (f"val2017/00{i}.png", "no label or annotation file lists it") for i in (4, 5, 6)
    ]


@pytest.mark.parametrize("key", ["image_id", "category_id"])
def test_long_values_are_cut_in_messages(folder: Path, key: str) -> None:
    path = folder / "annotations" / "train.json"
    coco_json(path, [image(0), image(1)], [box(0, 18), box(1, 1) | {key: "x" * 10_000}])
    with pytest.raises(ValueError, match="xxx…") as error:
        source(folder, "train").splits()
    assert len(str(error.value)) < 400


def test_a_name_that_is_too_long_is_an_error_that_names_the_image(folder: Path) -> None:
    path = folder / "annotations" / "train.json"
    coco_json(path, [image(0), image(1), image(2, 300 * "x")], [box(0, 18), box(1, 1), box(2, 1)])
    with pytest.raises(ValueError, match=r"train\.json, image 2: .* longer than a file name"):
        source(folder, "train").splits()
