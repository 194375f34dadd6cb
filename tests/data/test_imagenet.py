"""ImageNet from its tars, which are read in place, and from extracted folders."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from data.images.decode import decode
from data.shards.manifest import Manifest
from data.shards.split import open_split
from data.shards.writer import write_shards
from data.skipped import SKIPPED
from data.sources import ImageNet
from data.sources.layouts.ilsvrc_devkit import read_devkit
from launch.commands.shard import app
from tests.data import ilsvrc
from tests.data.conftest import write_image
from tests.data.killed import check_killed_and_resumed, contents

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
KEPT = {"original": True}  # images keep their bytes


def samples(folder: Path, split: str) -> dict[str, tuple[bytes, str]]:
    """Key -> (bytes, class) of a split."""
    with open_split(folder, split) as opened:
        names = [info.name for info in opened.classes]
        read = ((opened.key(i), *opened.read(i)) for i in range(len(opened)))
        return {key: (data, names[label]) for key, data, _, label in read}


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    return ilsvrc.write_tars(tmp_path / "tars")


def expected_training() -> dict[str, tuple[bytes, str]]:
    return {
        f"{wnid}/{name.removesuffix('.JPEG')}": (data, wnid)
        for wnid, files in ilsvrc.training().items()
        for name, data in files.items()
    }


def expected_validation() -> dict[str, tuple[bytes, str]]:
    return {
        f"val/{name.removesuffix('.JPEG')}": (data, ilsvrc.SYNSETS[number - 1][0])
        for (name, data), number in zip(ilsvrc.validation().items(), ilsvrc.TRUTH, strict=True)
    }


def test_tars_of_tars_give_every_image_with_its_class(tars: Path, tmp_path: Path) -> None:
    source = ImageNet(tars, **KEPT)
    write_shards(source, tmp_path / "out", samples_per_shard=4, workers=1)
    assert samples(tmp_path / "out", "train") == expected_training()
    assert samples(tmp_path / "out", "test") == expected_validation()
    assert Manifest.load(tmp_path / "out").class_names == ilsvrc.CLASSES


@pytest.mark.parametrize("flat", [False, True])
def test_extracted_folders_give_the_same_shards_as_the_tars(
    tars: Path, tmp_path: Path, flat: bool
) -> None:
    folders = ilsvrc.write_folders(tmp_path / "folders", flat=flat)
    one, other = ImageNet(tars, short_side=16), ImageNet(folders, tars / DEVKIT, short_side=16)
    write_shards(one, tmp_path / "one", samples_per_shard=4, workers=2)
    write_shards(other, tmp_path / "other", samples_per_shard=4, workers=1)
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def test_classes_carry_their_words_and_what_is_above_them(tars: Path) -> None:
    infos = {info.name: info.attributes for info in ImageNet(tars).classes()}
    assert tuple(infos) == ilsvrc.CLASSES
    assert infos["n02100735"] == {
        "words": "English setter",
        "gloss": "an English breed",
        "parents": "n02084071",
        # n02084071 stands under two: the first that the devkit lists counts.
        "path": "entity > dog",
    }
    assert infos["n02119789"]["path"] == "entity > canine"
    assert infos["n01440764"]["words"] == "tench, Tinca tinca"


def test_several_parents_are_joined_by_a_space(tars: Path) -> None:
    extra = ("n00002137", "pet", "", (2,), 0)
    (tars / DEVKIT).write_bytes(ilsvrc.devkit(ilsvrc.meta_mat((*ilsvrc.SYNSETS, extra))))
    source = ImageNet(tars)
    setter = source.classes()[1].attributes
    assert setter["parents"] == "n02084071 n00002137"
    assert "2 synsets at and above the classes have several parents" in source.notes()[0]


def test_without_a_devkit_a_taxonomy_names_the_classes(tars: Path, tmp_path: Path) -> None:
    folders = ilsvrc.write_folders(tmp_path / "folders", flat=False)
    source = ImageNet(folders, taxonomy=read_devkit(tars / DEVKIT))
    wanted = [dict(info.attributes) for info in ImageNet(tars).classes()]
    for about in wanted:
        del about["gloss"]
    assert [info.attributes for info in source.classes()] == wanted
    assert not any("no words" in note for note in source.notes())
    assert source.describe() != ImageNet(folders).describe()


def test_the_devkit_may_be_its_folder(tars: Path, tmp_path: Path) -> None:
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


def test_without_a_devkit_classes_are_the_sorted_folders(tmp_path: Path) -> None:
    folders = ilsvrc.write_folders(tmp_path / "folders", flat=False)
    source = ImageNet(folders, **KEPT)
    write_shards(source, tmp_path / "out", workers=1)
    classes = Manifest.load(tmp_path / "out").classes
    assert [(info.name, info.attributes) for info in classes] == [(n, {}) for n in ilsvrc.CLASSES]
    assert samples(tmp_path / "out", "test") == expected_validation()
    assert "classes have no words" in source.notes()[0]


@pytest.mark.parametrize("layout", ["tar", "flat"])
def test_flat_validation_without_a_devkit_names_the_devkit(tmp_path: Path, layout: str) -> None:
    if layout == "tar":
        folder = ilsvrc.write_tars(tmp_path / "in", with_devkit=False)
    else:
        folder = ilsvrc.write_folders(tmp_path / "in")
    message = error_of(folder)
    assert str(folder / (VAL_TAR if layout == "tar" else "val")) in message
    assert "put ILSVRC2012_devkit_t12.tar.gz beside it" in message


def test_a_cmyk_jpeg_and_a_png_called_jpeg_come_through(tmp_path: Path) -> None:
    """ImageNet has some twenty of the first kind and one of the second."""
    colours = np.zeros((40, 60, 3), np.uint8)
    colours[:, :30], colours[:, 30:] = (200, 30, 40), (20, 160, 220)
    odd = {}
    for name, mode, kind in (("cmyk", "CMYK", "JPEG"), ("png", "RGB", "PNG")):
        buffer = io.BytesIO()
        Image.fromarray(colours).convert(mode).save(buffer, kind, quality=95)
        odd[f"{name}.JPEG"] = buffer.getvalue()
    classes = ilsvrc.training() | {"n01440764": odd}
    (tmp_path / TRAIN_TAR).write_bytes(ilsvrc.training_tar(classes))
    for original, endings in ((True, {"jpg", "png"}), (False, {"jpg"})):
        source = ImageNet(tmp_path, short_side=20, original=original)
        found = [source.render(t) for t in source.splits()["train"] if t.label == 0]
        assert {sample.extension for sample in found} == endings
        for sample in found:
            pixels = decode(sample.data, 3).astype(int)
            side = pixels.shape[1]
            assert pixels.shape == ((40, 60, 3) if original else (20, 30, 3))
            assert np.abs(pixels[:, : side // 2 - 4] - [200, 30, 40]).max() < 12
            assert np.abs(pixels[:, side // 2 + 4 :] - [20, 160, 220]).max() < 12


def test_killed_and_resumed_gives_the_same_bytes(tars: Path, tmp_path: Path) -> None:
    source = ImageNet(tars, short_side=16)
    check_killed_and_resumed(source, tmp_path, samples_per_shard=4, workers=2)


def test_the_listing_says_how_far_it_is(tars: Path, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    source = ImageNet(tars, report=lambda *now: heard.append(now))
    source.notes()
    assert heard == [(1, 3), (2, 3), (3, 3)]
    write_shards(source, tmp_path / "out", workers=2)  # which get no listing, and whom to tell
    assert len(heard) == 3


def error_of(folder: Path, devkit: Path | None = None) -> str:
    """The message of writing what is in `folder`: one line, and nothing written."""
    out = folder.parent / "out"
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        write_shards(ImageNet(folder, devkit), out, workers=0)
    assert "\n" not in str(error.value)
    assert not out.exists()
    return str(error.value)


def spoil(path: Path, place: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[place : place + len(data)] = data
    path.write_bytes(content)


def test_a_cut_tar_names_the_tar_and_what_is_cut(tars: Path) -> None:
    path = tars / TRAIN_TAR
    content = path.read_bytes()
    middle = content.index(b"n02100735.tar") + 3000
    path.write_bytes(content[:middle])
    message = error_of(tars)
    assert message.startswith(f"{path}: it is cut off inside n02100735.tar")
    assert message.endswith("download the tar again")


def test_a_tar_cut_at_the_edge_of_a_member_is_no_smaller_tar(tars: Path) -> None:
    """Python's tarfile would read it to its end without a word."""
    path = tars / VAL_TAR
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"ILSVRC2012_val_00000004")])
    assert f"{path}: it is cut off at byte" in error_of(tars)


def test_a_damaged_header_in_an_inner_tar_is_named_with_both_tars(tars: Path) -> None:
    path = tars / TRAIN_TAR
    content = path.read_bytes()
    place = content.index(b"n02119789_1.JPEG")
    spoil(path, place, b"N")
    message = error_of(tars)
    assert f"{path}, n02119789.tar in it: the header at byte {place:,} is damaged" in message


def test_members_behind_a_wiped_header_are_not_lost_silently(tars: Path) -> None:
    path = tars / VAL_TAR
    spoil(path, path.read_bytes().index(b"ILSVRC2012_val_00000003"), bytes(512))
    assert "there is data behind the mark of its end" in error_of(tars)


def test_an_inner_tar_that_is_none(tars: Path) -> None:
    (tars / TRAIN_TAR).write_bytes(ilsvrc.tar({"n01440764.tar": b"<html>" * 1000}))
    assert "n01440764.tar in it: the header at byte 512 is damaged" in error_of(tars)


def test_a_member_twice_or_a_link_is_refused(tars: Path) -> None:
    two = ilsvrc.tar({"a": b""})[:512] + ilsvrc.tar({"a": b""})
    (tars / VAL_TAR).write_bytes(two)
    assert f"{VAL_TAR}: it holds a twice" in error_of(tars)
    link = bytearray(ilsvrc.tar({"a": b""}))
    link[156:157] = b"2"
    link[154 - 6 : 154] = b"%06o" % (sum(link[:148]) + 8 * 32 + sum(link[156:512]))
    (tars / VAL_TAR).write_bytes(link)
    assert "a is of tar type b'2', not a plain file" in error_of(tars)


@pytest.mark.parametrize("long", [False, True])
def test_extended_headers_may_tell_times_but_no_names(tars: Path, long: bool) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in ilsvrc.validation().items():
            member = tarfile.TarInfo("folder/" * (20 * long) + name)
            member.size, member.mtime = len(data), 0.5
            archive.addfile(member, io.BytesIO(data))
    wanted = ImageNet(tars).describe()
    (tars / VAL_TAR).write_bytes(buffer.getvalue())
    if long:
        assert "is an extended header with a name or size, which is not read" in error_of(tars)
    else:
        assert ImageNet(tars).describe() == wanted


def test_equal_names_in_class_folders_of_val_stay_apart(tmp_path: Path) -> None:
    folders = ilsvrc.write_folders(tmp_path / "in", flat=False)
    for wnid in ilsvrc.CLASSES:
        ilsvrc.write_files(folders / "val" / wnid, {"0.JPEG": ilsvrc.image(0)})
    tasks = ImageNet(folders).splits()["test"]
    assert {f"val/{wnid}/0" for wnid in ilsvrc.CLASSES} < {task.key for task in tasks}
    assert len({task.key for task in tasks}) == len(tasks) == 8


def test_an_image_that_shrank_since_it_was_listed_is_named(tmp_path: Path) -> None:
    folders = ilsvrc.write_folders(tmp_path / "in", flat=False)
    source = ImageNet(folders)
    task = source.splits()["train"][0]
    (folders / task.file).write_bytes(b"\xff\xd8\xff")
    with pytest.raises(ValueError, match=rf"{task.file}: it has 3 of the \d+ bytes .* listed"):
        source.render(task)


def test_a_damaged_image_is_named_with_its_tar_and_may_be_left_out(
    tars: Path, tmp_path: Path
) -> None:
    path = tars / TRAIN_TAR
    spoil(path, path.read_bytes().index(b"n02119789_1.JPEG") + 512, b"no image")
    message = error_of(tars)
    assert message.startswith(f"{path}, n02119789/n02119789_1 in it: not an image")
    assert message.endswith("give --skip-bad")
    written = write_shards(ImageNet(tars, skip_bad=True), tmp_path / "out", workers=1)
    assert written.num_skipped == 1
    skipped = json.loads((tmp_path / "out" / SKIPPED).read_text())
    assert skipped["name"] == f"{TRAIN_TAR}: n02119789/n02119789_1"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ilsvrc.devkit()[:-300], "is damaged"),
        (b"<html>not found</html>", "is no tar archive"),
        (ilsvrc.devkit(b"MATLAB 5.0 MAT-file" + bytes(500)), "meta.mat is damaged"),
        (ilsvrc.devkit(ilsvrc.meta_mat()[:-40]), "meta.mat is damaged"),
        (ilsvrc.devkit(ilsvrc.meta_mat(fields=ilsvrc.FIELDS[:5])), "have no children"),
        (ilsvrc.devkit(truth=(2, 1, 9, 3, 1)), "line 3: '9' is no ILSVRC2012_ID"),
        (ilsvrc.devkit(truth=(2, "x")), "line 2: 'x' is no ILSVRC2012_ID"),
        (ilsvrc.tar({"readme.txt": b""}), "holds no data/ILSVRC2012_validation_ground_truth.txt"),
    ],
)
def test_a_damaged_devkit_is_named(tars: Path, content: bytes, said: str) -> None:
    (tars / DEVKIT).write_bytes(content)
    message = error_of(tars)
    assert message.startswith(str(tars / DEVKIT))
    assert said in message
    assert "download" in message or "give" in message


def test_a_synset_above_itself_is_refused(tars: Path) -> None:
    rows = [*ilsvrc.SYNSETS]
    rows[3] = ("n00001740", "entity", "", (), 0)
    rows[4] = ("n02083346", "canine", "", (7,), 0)
    rows[6] = ("n02084071", "dog", "", (2, 5), 0)
    (tars / DEVKIT).write_bytes(ilsvrc.devkit(ilsvrc.meta_mat(rows)))
    assert "has n02084071 above itself, over class n02100735" in error_of(tars)


def test_a_validation_image_beyond_the_devkit_is_refused(tars: Path) -> None:
    (tars / DEVKIT).write_bytes(ilsvrc.devkit(truth=ilsvrc.TRUTH[:4]))
    message = error_of(tars)
    assert "ILSVRC2012_val_00000005.JPEG is none of ILSVRC2012_val_00000001.JPEG to" in message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("goldfish", "holds 'goldfish', which is no synset id such as n01440764"),
        ("n09999999", "has class n09999999, which"),
    ],
)
def test_classes_are_synsets_of_the_devkit(tars: Path, name: str, said: str) -> None:
    classes = ilsvrc.training() | {name: {"0.JPEG": ilsvrc.image(0)}}
    (tars / TRAIN_TAR).write_bytes(ilsvrc.training_tar(classes))
    assert said in error_of(tars)


def test_a_folder_without_imagenet_says_what_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    assert f"holds neither {TRAIN_TAR} nor train/" in error_of(tmp_path / "in")


def test_what_is_missing_against_the_devkit_is_noted(tars: Path, tmp_path: Path) -> None:
    classes = ilsvrc.training()
    del classes["n02119789"]
    classes["n02100735"].popitem()
    classes["n02100735"]["notes.txt"] = b""
    (tars / TRAIN_TAR).write_bytes(ilsvrc.training_tar(classes))
    source = ImageNet(tars)
    assert source.notes()[1:] == [
        "training has 2 of the devkit's 3 classes: without n02119789",
        "training differs from the devkit in 1 classes: n02100735 has 2 images and not 3",
        "skipped 'ILSVRC2012_img_train.tar: n02100735/notes.txt': "
        "its name does not end in .bmp, .gif, .jpeg, .jpg, .png, .webp",
        f"skipped '{VAL_TAR}: val/ILSVRC2012_val_00000002.JPEG', "
        f"'{VAL_TAR}: val/ILSVRC2012_val_00000005.JPEG': "
        "validation image of a class that is not in training",
    ]
    write_shards(source, tmp_path / "out", workers=1)
    assert len(samples(tmp_path / "out", "test")) == 3
    (tars / VAL_TAR).unlink()
    assert f"neither {VAL_TAR} nor val/: there is no test split" in ImageNet(tars).notes()


def test_what_is_beside_the_class_folders_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for place in ("train", "val"):
        for synset in ("n02100735", "n02119789"):
            write_image(folder / place / synset / f"{place}_{synset}.JPEG", 0)
    (folder / "train" / "n01440764").symlink_to(tmp_path / "gone")
    write_image(folder / "val" / "ILSVRC2012_val_00000003.JPEG", 0)
    assert dict(ImageNet(folder).skipped()) == {
        "train/n01440764": "broken symbolic link",
        "val/ILSVRC2012_val_00000003.JPEG": "outside the class folders",
    }


def test_the_description_tells_labels_and_sizes_apart(tars: Path) -> None:
    wanted = ImageNet(tars).describe()
    assert ImageNet(tars).describe() == wanted
    (tars / DEVKIT).write_bytes(ilsvrc.devkit(truth=ilsvrc.TRUTH[::-1]))
    assert ImageNet(tars).describe() != wanted
    (tars / DEVKIT).write_bytes(ilsvrc.devkit())
    classes = ilsvrc.training()
    classes["n02100735"]["n02100735_0.JPEG"] += b"\0"
    (tars / TRAIN_TAR).write_bytes(ilsvrc.training_tar(classes))
    assert ImageNet(tars).describe() != wanted


def test_the_command_names_what_is_missing_and_what_was_made(tars: Path, tmp_path: Path) -> None:
    (tars / VAL_TAR).unlink()
    arguments = ["imagenet", str(tars), "-o", str(tmp_path / "out"), "--original"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert f"note: {tars}: neither {VAL_TAR} nor val/" in done.stderr
    assert "10 train samples, 3 classes, 1 shard" in done.stdout
    assert samples(tmp_path / "out", "train") == expected_training()
