"""ImageNet from its tars, which are read in place."""

import json
import pickle
from pathlib import Path

import pytest

from data.shards.manifest import Manifest
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.skipped import SKIPPED, by_reason
from data.sources import ImageNet
from tests.data import ilsvrc
from tests.data.conftest import error_of, overwrite

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"


def samples(folder: Path, split: str) -> dict[str, tuple[bytes, str]]:
    """Return key -> (bytes, class) of a split."""
    with open_split(folder, split) as opened:
        names = [info.name for info in opened.classes]
        read = ((opened.key(i), *opened.read(i)) for i in range(len(opened)))
        return {key: (data, names[label]) for key, data, _, label in read}


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    return ilsvrc.write_tars(tmp_path / "tars")


def test_tars_of_tars_give_every_image_with_its_class(tars: Path, tmp_path: Path) -> None:
    source = ImageNet(tars, original=True)
    source.splits()
    source = pickle.loads(pickle.dumps(source))  # as a worker process receives it
    write_shards(source, tmp_path / "out", samples_per_shard=4, workers=1)
    assert samples(tmp_path / "out", "train") == {
        f"{wnid}/{name.removesuffix('.JPEG')}": (data, wnid)
        for wnid, files in ilsvrc.training().items()
        for name, data in files.items()
    }
    assert samples(tmp_path / "out", "test") == {
        f"val/{name.removesuffix('.JPEG')}": (data, ilsvrc.SYNSETS[number - 1][0])
        for (name, data), number in zip(ilsvrc.validation().items(), ilsvrc.TRUTH, strict=True)
    }
    assert Manifest.load(tmp_path / "out").class_names == ilsvrc.CLASSES


def test_ambiguous_node_names_include_the_synset(tars: Path) -> None:
    rows = [*ilsvrc.SYNSETS]
    rows[4] = ("n02083346", "canine", "", (1,), 0)
    rows[5] = ("n01439121", "canine", "", (3,), 0)
    rows[6] = ("n02084071", "entity", "", (2,), 0)
    (tars / DEVKIT).write_bytes(ilsvrc.devkit(ilsvrc.meta_mat(rows)))
    assert [info.attributes["path"] for info in ImageNet(tars).classes()] == [
        "entity > canine (n01439121)",
        "entity > entity (n02084071)",
        "entity > canine (n02083346)",
    ]


def test_classes_have_words_gloss_parents_and_path(tars: Path) -> None:
    infos = {info.name: info.attributes for info in ImageNet(tars).classes()}
    assert tuple(infos) == ilsvrc.CLASSES
    assert infos["n02100735"] == {
        "words": "English setter",
        "gloss": "an English breed",
        "parents": "n02084071",
        # n02084071 has two parents; the first one in the devkit is used.
        "path": "entity > dog",
    }
    assert infos["n02119789"]["path"] == "entity > canine"
    assert infos["n01440764"]["words"] == "tench, Tinca tinca"


def test_the_devkit_may_be_unpacked(tars: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ILSVRC2012_devkit_t12"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "meta.mat").write_bytes(ilsvrc.meta_mat())
    truth = "".join(f"{number}\n" for number in ilsvrc.TRUTH)
    (folder / "data" / "ILSVRC2012_validation_ground_truth.txt").write_text(truth)
    wanted = ImageNet(tars).describe()
    (tars / DEVKIT).unlink()
    assert ImageNet(tars, folder).describe() == wanted
    folder.rename(tars / folder.name)
    assert ImageNet(tars).describe() == wanted


def test_damage_raises_an_error_that_names_the_tar_and_the_tar_in_it(tars: Path) -> None:
    path = tars / TRAIN_TAR
    content = path.read_bytes()
    offset = content.index(b"n02119789_1.JPEG")
    overwrite(path, offset, b"N")
    assert f"{path}: n02119789.tar: at byte {offset:,}: " in error_of(ImageNet, tars)
    path.write_bytes(content[: content.index(b"n02100735.tar") + 3000])
    message = error_of(ImageNet, tars)
    assert f"{path}: at byte" in message
    assert "n02100735.tar is truncated" in message


def test_a_repeated_member_or_a_link_raises(tars: Path) -> None:
    two = ilsvrc.tar({"a": b""})[:512] + ilsvrc.tar({"a": b""})
    (tars / VAL_TAR).write_bytes(two)
    assert f"{VAL_TAR}: it contains a twice" in error_of(ImageNet, tars)
    link = bytearray(ilsvrc.tar({"a": b""}))
    link[156:157] = b"2"
    link[154 - 6 : 154] = b"%06o" % (sum(link[:148]) + 8 * 32 + sum(link[156:512]))
    (tars / VAL_TAR).write_bytes(link)
    assert "a is a link, a device or a sparse file" in error_of(ImageNet, tars)


def test_a_damaged_image_is_reported_with_its_tar_and_can_be_skipped(
    tars: Path, tmp_path: Path
) -> None:
    path = tars / TRAIN_TAR
    overwrite(path, path.read_bytes().index(b"n02119789_1.JPEG") + 512, b"no image")
    message = error_of(ImageNet, tars)
    assert message.startswith(f"{path}: n02119789/n02119789_1: not an image")
    assert message.endswith("pass --skip-bad")
    written = write_shards(ImageNet(tars, skip_bad=True), tmp_path / "out", workers=1)
    assert written.num_skipped == 1
    skipped = json.loads((tmp_path / "out" / SKIPPED).read_text())
    assert skipped["name"] == f"{TRAIN_TAR}: n02119789/n02119789_1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ilsvrc.devkit()[:-300], "is damaged"),
        (b"<html>not found</html>", "not a tar archive"),
        (ilsvrc.devkit(ilsvrc.meta_mat()[:-40]), "meta.mat is damaged"),
        (ilsvrc.devkit(truth=(2, 1, 9, 3, 1)), "line 3: '9' is not an ILSVRC2012_ID"),
        (ilsvrc.tar({"readme.txt": b""}), "does not contain ILSVRC2012_validation_ground_truth"),
    ],
)
def test_a_damaged_devkit_raises_an_error_that_names_its_path(
    tars: Path, content: bytes, message: str
) -> None:
    (tars / DEVKIT).write_bytes(content)
    found = error_of(ImageNet, tars)
    assert found.startswith(str(tars / DEVKIT))
    assert message in found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("goldfish", "contains 'goldfish', which is not a synset ID such as n01440764"),
        ("n09999999", "contains class n09999999, which is not in the devkit"),
    ],
)
def test_a_class_that_is_not_a_synset_of_the_devkit_raises(
    tars: Path, name: str, message: str
) -> None:
    classes = ilsvrc.training() | {name: {"0.JPEG": ilsvrc.image(0)}}
    (tars / TRAIN_TAR).write_bytes(ilsvrc.training_tar(classes))
    assert message in error_of(ImageNet, tars)


def test_images_that_are_not_read_are_noted(tars: Path, tmp_path: Path) -> None:
    classes = ilsvrc.training()
    del classes["n02119789"]
    classes["n02100735"]["notes.txt"] = b""
    (tars / TRAIN_TAR).write_bytes(ilsvrc.training_tar(classes))
    source = ImageNet(tars)
    assert by_reason(source.skipped()) == [
        "skipped 'ILSVRC2012_img_train.tar: n02100735/notes.txt': "
        "its name does not end in .bmp, .gif, .jpeg, .jpg, .png, .webp",
        f"skipped '{VAL_TAR}: val/ILSVRC2012_val_00000002.JPEG', "
        f"'{VAL_TAR}: val/ILSVRC2012_val_00000005.JPEG': "
        "validation image of a class that is not in training",
    ]
    write_shards(source, tmp_path / "out", workers=1)
    assert len(samples(tmp_path / "out", "test")) == 3
    (tars / VAL_TAR).unlink()
    assert any("there is no test split" in note for note in ImageNet(tars).notes())
