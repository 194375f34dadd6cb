"""The snippets and commands of docs/layouts.md, run on small copies of the published layouts."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
import pyarrow as arrow
import pytest
from pyarrow import parquet
from scipy.io import savemat

from data.shards.manifest import Manifest
from data.shards.split import open_split
from tests.data.conftest import kway_shard, write_image

PAGE = (Path(__file__).parents[2] / "docs/layouts.md").read_text(encoding="utf-8")
_CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
_COMMAND = re.compile(r"^    kway shard (.+)$", re.MULTILINE)

Found = dict[str, dict[str, int]]
"""Split -> class -> number of samples."""

LAYOUTS: dict[str, tuple[Callable[[], None], Found]] = {}


def layout(name: str, **splits: dict[str, int]) -> Callable[[Callable[[], None]], Callable]:
    """Register a function that writes a layout to the working directory, and the samples that the
    shards must contain.
    """

    def register(build: Callable[[], None]) -> Callable[[], None]:
        LAYOUTS[name] = build, splits
        return build

    return register


def images(*paths: str) -> None:
    for path in paths:
        file = Path(path)
        write_image(file.with_suffix(".png"), crc32(path.encode()))
        file.with_suffix(".png").rename(file)


def text(path: str, *lines: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def records(**columns: list) -> np.ndarray:
    """Return a MATLAB structure array."""
    kinds = [(name, object) for name in columns]
    return np.array(list(zip(*columns.values(), strict=True)), kinds)


def strings(*values: str) -> np.ndarray:
    """Return a MATLAB cell array."""
    return np.array(values, object)


@layout("Imagenette", train={"n01": 1, "n02": 1}, test={"n01": 1})
def imagenette() -> None:
    images("train/n01/a.JPEG", "train/n02/b.JPEG", "val/n01/c.JPEG")
    text("noisy_imagenette.csv", "path,noisy_labels_0")


def _class_folders(folder: str) -> None:
    images(f"{folder}/a/1.jpg", f"{folder}/b/1.jpg")
    text(f"{folder}/a/.DS_Store", "")
    text(f"{folder}/a/._1.jpg", "")


for _name, _folder in (
    ("Caltech-101", "101_ObjectCategories"),
    ("Caltech-256", "256_ObjectCategories"),
    ("EuroSAT", "2750"),
):
    layout(_name, train={"a": 1, "b": 1})(partial(_class_folders, _folder))


@layout("Intel Image Classification", train={"sea": 1, "street": 1}, test={"sea": 1})
def intel() -> None:
    images("seg_train/seg_train/sea/1.jpg", "seg_train/seg_train/street/2.jpg")
    images("seg_test/seg_test/sea/3.jpg", "seg_pred/seg_pred/4.jpg")


@layout("CUB-200-2011", train={"001.Albatross": 1, "002.Auk": 1}, test={"002.Auk": 1})
def cub() -> None:
    images("images/001.Albatross/a.jpg", "images/002.Auk/b.jpg", "images/002.Auk/c.jpg")
    text("images.txt", "1 001.Albatross/a.jpg", "2 002.Auk/b.jpg", "3 002.Auk/c.jpg")
    text("image_class_labels.txt", "1 1", "2 2", "3 2")
    text("train_test_split.txt", "1 1", "2 1", "3 0")
    text("classes.txt", "1 001.Albatross", "2 002.Auk")


@layout("NABirds", train={"Black Duck 3": 1, "Wood Duck 4": 1}, test={"Wood Duck 4": 1})
def nabirds() -> None:
    images("images/0003/a.jpg", "images/0004/b.jpg", "images/0004/c.jpg")
    text("images.txt", "u-1 0003/a.jpg", "u-2 0004/b.jpg", "u-3 0004/c.jpg")
    text("image_class_labels.txt", "u-1 3", "u-2 4", "u-3 4")
    text("train_test_split.txt", "u-1 1", "u-2 1", "u-3 0")
    text("classes.txt", "0 Birds", "1 Ducks", "3 Black Duck", "4 Wood Duck")
    text("hierarchy.txt", "1 0", "3 1", "4 1")


@layout("Oxford-IIIT Pets", train={"Abyssinian": 1, "shiba_inu": 1}, test={"shiba_inu": 1})
def pets() -> None:
    images("images/Abyssinian_1.jpg", "images/shiba_inu_1.jpg", "images/shiba_inu_2.jpg")
    text("annotations/trainval.txt", "Abyssinian_1 1 1 1", "shiba_inu_1 2 2 1")
    text("annotations/test.txt", "shiba_inu_2 2 2 1")


@layout("Stanford Dogs", train={"Chihuahua": 1, "toy-terrier": 1}, test={"Chihuahua": 2})
def dogs() -> None:
    train = ("n02085620-Chihuahua/n1.jpg", "n02087046-toy-terrier/n2.jpg")
    test = ("n02085620-Chihuahua/n3.jpg", "n02085620-Chihuahua/n4.jpg")
    images(*(f"Images/{path}" for path in train + test))
    savemat("train_list.mat", {"file_list": strings(*train)[:, None]})
    savemat("test_list.mat", {"file_list": strings(*test)[:, None]})


@layout("Stanford Cars", train={"Acura RL 2012": 1, "BMW M3": 1}, test={"BMW M3": 2})
def cars() -> None:
    images("cars_train/1.jpg", "cars_train/2.jpg", "cars_test/1.jpg", "cars_test/2.jpg")
    Path("devkit").mkdir()
    savemat("devkit/cars_meta.mat", {"class_names": strings("Acura RL 2012", "BMW M3")})
    train = records(bbox_x1=[1, 2], **{"class": [1, 2]}, fname=["1.jpg", "2.jpg"])
    test = records(bbox_x1=[1, 2], **{"class": [2, 2]}, fname=["1.jpg", "2.jpg"])
    savemat("devkit/cars_train_annos.mat", {"annotations": train})
    savemat("cars_test_annos_withlabels.mat", {"annotations": test})


@layout("Flowers-102", train={"1": 1, "2": 1}, validation={"2": 2}, test={"1": 2})
def flowers() -> None:
    images(*(f"jpg/image_{number:05d}.jpg" for number in range(1, 7)))
    savemat("imagelabels.mat", {"labels": np.array([1, 2, 2, 2, 1, 1])})
    ids = {"trnid": np.array([1, 2]), "valid": np.array([3, 4]), "tstid": np.array([5, 6])}
    savemat("setid.mat", ids)


@layout("Food-101", train={"apple_pie": 1, "waffles": 1}, test={"waffles": 1})
def food() -> None:
    images("images/apple_pie/1.jpg", "images/waffles/1.jpg", "images/waffles/2.jpg")
    text("meta/train.txt", "apple_pie/1", "waffles/1")
    text("meta/test.txt", "waffles/2")


@layout("FGVC-Aircraft", train={"707-320": 1, "An-12 B": 1}, validation={"An-12 B": 1},
        test={"707-320": 1})  # fmt: skip
def aircraft() -> None:
    images(*(f"data/images/003430{number}.jpg" for number in range(4)))
    text("data/images_variant_train.txt", "0034300 707-320", "0034301 An-12 B")
    text("data/images_variant_val.txt", "0034302 An-12 B")
    text("data/images_variant_test.txt", "0034303 707-320")


@layout("Describable Textures (DTD)", train={"banded": 1, "dotted": 1}, validation={"banded": 1},
        test={"dotted": 1})  # fmt: skip
def dtd() -> None:
    images(*(f"images/{kind}/{kind}_{i}.jpg" for kind in ("banded", "dotted") for i in (1, 2)))
    text("labels/train1.txt", "banded/banded_1.jpg", "dotted/dotted_1.jpg")
    text("labels/val1.txt", "banded/banded_2.jpg")
    text("labels/test1.txt", "dotted/dotted_2.jpg")


@layout("SUN397", train={"abbey": 1, "zoo/indoor": 1}, test={"abbey": 1})
def sun() -> None:
    images("SUN397/a/abbey/1.jpg", "SUN397/a/abbey/2.jpg", "SUN397/z/zoo/indoor/1.jpg")
    text("Partitions/Training_01.txt", "/a/abbey/1.jpg", "/z/zoo/indoor/1.jpg")
    text("Partitions/Testing_01.txt", "/a/abbey/2.jpg")


@layout("Places365", train={"airfield": 1, "zoo": 1}, test={"zoo": 1})
def places() -> None:
    images("data_256/a/airfield/1.jpg", "data_256/z/zoo/1.jpg", "val_256/Places365_val_1.jpg")
    text("categories_places365.txt", "/a/airfield 0", "/z/zoo 1")
    text("places365_train_standard.txt", "/a/airfield/1.jpg 0", "/z/zoo/1.jpg 1")
    text("places365_val.txt", "Places365_val_1.jpg 1")


@layout("Tiny ImageNet", train={"n01": 1, "n02": 1}, test={"n02": 1})
def tiny_imagenet() -> None:
    images("train/n01/images/n01_0.JPEG", "train/n02/images/n02_0.JPEG")
    images("val/images/val_0.JPEG", "test/images/test_0.JPEG")
    text("train/n01/n01_boxes.txt", "n01_0.JPEG\t0\t0\t9\t9")
    text("val/val_annotations.txt", "val_0.JPEG\tn02\t0\t32\t44\t62")


@layout("Omniglot", train={"Greek/character01": 3, "Oriya/character01": 2})
def omniglot() -> None:
    images(*(f"images_background/Greek/character01/00{i}.png" for i in range(3)))
    images(*(f"images_evaluation/Oriya/character01/00{i}.png" for i in range(2)))


@layout("Stanford 40 Actions", train={"cooking": 1, "fixing_a_bike": 1}, test={"cooking": 1})
def actions() -> None:
    images(*(f"JPEGImages/{name}.jpg" for name in ("cooking_1", "cooking_2", "fixing_a_bike_1")))
    text("ImageSplits/cooking_train.txt", "cooking_1.jpg")
    text("ImageSplits/fixing_a_bike_train.txt", "fixing_a_bike_1.jpg")
    text("ImageSplits/cooking_test.txt", "cooking_2.jpg")
    text("ImageSplits/train.txt", "cooking_1.jpg", "fixing_a_bike_1.jpg")


@layout("COCO", train={"cat": 1, "dog": 1}, test={"dog": 1})
def coco() -> None:
    images("train2017/1.jpg", "train2017/2.jpg", "train2017/3.jpg", "val2017/4.jpg")
    kinds = [{"id": 17, "name": "cat"}, {"id": 18, "name": "dog"}]
    categories = [{**kind, "supercategory": "animal"} for kind in kinds]
    boxes = {"train": [(1, 17, 5), (1, 18, 3), (2, 18, 4)], "val": [(4, 18, 9)]}
    for split, found in boxes.items():
        annotations = [{"image_id": i, "category_id": c, "area": a} for i, c, a in found]
        numbers = (1, 2, 3) if split == "train" else (4,)
        content = {
            "images": [{"id": i, "file_name": f"{i}.jpg"} for i in numbers],
            "annotations": annotations,
            "categories": categories,
        }
        text(f"annotations/instances_{split}2017.json", json.dumps(content))


@layout("iNaturalist", train={"Apis mellifera": 1, "Bombus": 1}, test={"Bombus": 1})
def inaturalist() -> None:
    ranks = ("kingdom", "phylum", "class", "order", "family", "genus")
    above = {rank: f"{rank}-1" for rank in ranks}
    categories = [
        {"id": i, "name": name, "common_name": "bee", **above}
        for i, name in enumerate(("Apis mellifera", "Bombus"))
    ]
    for split, found in {"train": [(1, 0), (2, 1)], "val": [(3, 1)]}.items():
        paths = {i: f"{split}/0000{c}_Animalia/{i}.jpg" for i, c in found}
        images(*paths.values())
        content = {
            "images": [{"id": i, "file_name": path} for i, path in paths.items()],
            "annotations": [{"image_id": i, "category_id": c} for i, c in found],
            "categories": categories,
        }
        text(f"{split}.json", json.dumps(content))


@layout("Pascal VOC", train={"bird": 2, "tvmonitor": 2}, test={"bird": 1})
def voc() -> None:
    images(*(f"JPEGImages/2008_00000{i}.jpg" for i in range(4)))
    names = [f"2008_00000{i}" for i in range(4)]
    present = {"bird": (1, -1, 1, 1), "tvmonitor": (-1, 1, 1, 0)}  # image 2 has both
    for kind, values in present.items():
        rows = [f"{name} {value:2}" for name, value in zip(names, values, strict=True)]
        text(f"ImageSets/Main/{kind}_train.txt", *rows[:3])
        text(f"ImageSets/Main/{kind}_val.txt", rows[3])
        text(f"ImageSets/Main/{kind}_trainval.txt", *rows)
    text("ImageSets/Main/train.txt", *names[:3])


@layout("Open Images", train={"Cat": 2, "Dog": 2}, validation={"Dog": 1}, test={"Cat": 1})
def open_images() -> None:
    images("train/a1.jpg", "train/b2.jpg", "train/c3.jpg", "validation/d4.jpg", "test/e5.jpg")
    text("class-descriptions.csv", "/m/1,Cat", "/m/2,Dog")
    rows = {
        "train": ("a1,verification,/m/1,1", "a1,verification,/m/2,0", "b2,verification,/m/2,1",
                  "c3,verification,/m/1,1", "c3,crowdsource,/m/2,1"),
        "validation": ("d4,verification,/m/2,1",),
        "test": ("e5,verification,/m/1,1", "e5,crowdsource,/m/1,1"),
    }  # fmt: skip
    for split, found in rows.items():
        header = "ImageID,Source,LabelName,Confidence"
        text(f"{split}-annotations-human-imagelabels.csv", header, *found)


@layout("HAM10000", train={"bkl": 2, "nv": 2})
def ham10000() -> None:
    images("HAM10000_images_part_1/ISIC_1.jpg", "HAM10000_images_part_1/ISIC_2.jpg")
    images("HAM10000_images_part_2/ISIC_3.jpg", "HAM10000_images_part_2/ISIC_4.jpg")
    rows = ("HAM_0,ISIC_1,bkl", "HAM_0,ISIC_2,bkl", "HAM_1,ISIC_3,nv", "HAM_2,ISIC_4,nv")
    text("HAM10000_metadata.csv", "lesion_id,image_id,dx", *rows)


@layout("Dog Breed Identification", train={"boxer": 2, "pug": 1})
def breeds() -> None:
    images("train/0a.jpg", "train/0b.jpg", "train/0c.jpg", "test/0d.jpg")
    text("labels.csv", "id,breed", "0a,boxer", "0b,boxer", "0c,pug")


@layout("Google Landmarks v2", train={"7": 3, "12": 3})
def landmarks() -> None:
    images(*(f"train/a/b/{i}/ab{i}f.jpg" for i in range(6)))
    rows = [f"ab{i}f,http://upload.wikimedia.org/a.jpg,{7 if i < 3 else 12}" for i in range(6)]
    text("train.csv", "id,url,landmark_id", *rows)


@layout("Parquet of the datasets library", train={"cat": 1, "dog": 1}, test={"dog": 1})
def hugging_face() -> None:
    from datasets import ClassLabel, Dataset, Features, Image

    features = Features({"image": Image(), "label": ClassLabel(names=["cat", "dog"])})
    images("data/a.png", "data/b.png", "data/c.png")
    files = [Path("data", name) for name in ("a.png", "b.png", "c.png")]
    *content, last = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
    train = Dataset.from_dict({"image": content, "label": [0, 1]}, features)
    train.to_parquet("data/train-00000-of-00001.parquet")
    held_out = Dataset.from_dict({"image": [last], "label": [1]}, features)
    held_out.to_parquet("data/test-00000-of-00001.parquet")
    for file in files:
        file.unlink()


@layout("img2dataset", train={"cat": 3, "dog": 3})
def img2dataset() -> None:
    images(*(f"{i}.jpg" for i in range(6)))
    content = [Path(f"{i}.jpg").read_bytes() for i in range(6)]
    table = {"jpg": content, "url": ["http://a"] * 6, "label": ["cat", "dog"] * 3}
    parquet.write_table(arrow.table(table), "00000.parquet")


@layout("20 Newsgroups", train={"alt.atheism": 1, "sci.space": 1}, test={"sci.space": 1})
def newsgroups() -> None:
    text("20news-bydate-train/alt.atheism/1", "From: a", "", "no")
    text("20news-bydate-train/sci.space/2", 'From: b\n"quoted, text"')
    text("20news-bydate-test/sci.space/3", "From: c")


@layout("IMDB reviews", train={"neg": 1, "pos": 1}, test={"pos": 1})
def imdb() -> None:
    text("train/pos/0_9.txt", "good")
    text("train/neg/0_1.txt", "bad")
    text("train/unsup/0_0.txt", "unlabeled")
    text("test/pos/0_10.txt", "great")


@layout("AG News", train={"Sports": 1, "World": 1}, test={"Sports": 1})
def ag_news() -> None:
    text("classes.txt", "World", "Sports")
    text("train.csv", '"2","A title","Some ""text"""', '"1","Other","text"')
    text("test.csv", '"2","Third","text"')


@layout("TREC", train={"DESC:manner": 1, "LOC:city": 1}, test={"LOC:city": 1})
def trec() -> None:
    text("train_5500.label", "DESC:manner How does it work ?", "LOC:city Where is it ?")
    text("TREC_10.label", "LOC:city Which city is it ?")


@layout("CLINC150", train={"oil": 1, "pto": 1}, validation={"oil": 1}, test={"pto": 1})
def clinc() -> None:
    found = {
        "train": [["check the oil", "oil"], ["a day off", "pto"]],
        "val": [["oil, please", "oil"]],
        "test": [["holidays", "pto"]],
        "oos_test": [["out of scope", "oos"]],
    }
    text("data_full.json", json.dumps(found))


@layout("Banking77", train={"card_arrival": 1, "top_up": 1}, test={"top_up": 1})
def banking() -> None:
    text("train.csv", "text,category", '"Where, is it?",card_arrival', "Top up?,top_up")
    text("test.csv", "text,category", "Top up!,top_up")


@layout("TweetEval", train={"fire": 1, "red heart": 1}, validation={"fire": 1},
        test={"red heart": 1})  # fmt: skip
def tweeteval() -> None:
    text("mapping.txt", "0\t❤\t_red_heart_", "1\t🔥\t_fire_")
    text("train_text.txt", "good day \ufe0f", "so hot", "seen before")
    text("train_labels.txt", "0", "1", "1")
    text("val_text.txt", "seen before")
    text("val_labels.txt", "1")
    text("test_text.txt", "my day\x85")
    text("test_labels.txt", "0")


@layout("SemEval 2018", train={"fire": 1, "red heart": 1}, validation={"fire": 1},
        test={"red heart": 1})  # fmt: skip
def semeval() -> None:
    text("us_mapping.txt", "0\t❤\t_red_heart_", "1\t🔥\t_fire_")
    for split, found in {"train": "01", "trial": "1", "test": "0"}.items():
        text(f"us_{split}.text", *(f"{split} {number}" for number in found))
        text(f"us_{split}.labels", *found)


def sections() -> dict[str, str]:
    """Return the content of each section of the page by its title."""
    parts = re.split(r"^### (.+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def written(folder: Path) -> Found:
    found = {}
    for name in Manifest.load(folder).splits:
        with open_split(folder, name) as split:
            labels = [split.classes[one].name for one in split.labels.tolist()]
        found[name] = dict(Counter(labels))
    return found


@pytest.mark.parametrize("name", sections())
def test_a_published_layout_becomes_shards_with_its_splits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, expected = LAYOUTS[name]
    content = sections()[name]
    folder = tmp_path / "published"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    build()
    snippet = _CODE.search(content)
    if snippet is not None:
        assert sum(bool(line) for line in snippet[1].splitlines()) <= 10
        preface = _CODE.search(PAGE.partition("### ")[0])
        assert preface is not None
        exec(compile(preface[1] + snippet[1], name, "exec"), {})
    (command,) = _COMMAND.findall(content)
    out = tmp_path / "shards"
    arguments = [str(out) if one.startswith("../shards/") else one for one in shlex.split(command)]
    done = kway_shard(*arguments, "--workers", 0)
    assert done.exit_code == 0, f"{done.output}\n{done.exception}"
    found = written(out)
    if set(expected) == {"train"}:  # there is no published split
        assert done.stderr.startswith("random split")
        assert sum(map(Counter, found.values()), Counter()) == Counter(expected["train"])
    else:
        assert "random split" not in done.stderr
        assert found == expected


def test_a_hierarchy_column_becomes_the_path_of_the_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_a_published_layout_becomes_shards_with_its_splits("NABirds", tmp_path, monkeypatch)
    manifest = Manifest.load(tmp_path / "shards")
    assert [info.attributes for info in manifest.classes] == [{"path": "Birds > Ducks"}] * 2
