"""The output of `kway shard show`."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.inspection.show import contact_sheet, examples
from data.shards.split import open_split
from data.sources.generated import write_shards
from launch.terminal import table_cell
from tests.data.bad_images import encoded
from tests.data.conftest import kway_shard
from tests.data.foreign_tars import planted_shards


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write texts of 40 classes. Class k has k + 1 texts, and the texts of the last class contain
    control characters."""
    folder = tmp_path_factory.mktemp("texts") / "out"
    samples = []
    for label in range(40):
        text = f"text of {label} [bold]\x1b[31m\u202e\n" if label == 39 else f"text of {label}"
        samples += [(text, f"class {label:02d}")] * (label + 1)
    write_shards(samples, folder, modality="text", test_fraction=0, workers=0)
    return folder


def test_examples_are_spread_evenly_over_the_classes(texts: Path) -> None:
    with open_split(texts, "train") as split:
        labels = split.labels
        assert labels[examples(split, 4)].tolist() == [0, 13, 26, 39]
        assert labels[examples(split, 1)].tolist() == [0]
        many = examples(split, 400)
        assert len(set(many)) == len(many)
        assert np.bincount(labels[many]).tolist() == [min(10, k + 1) for k in range(40)]


def test_show_prints_the_count_of_every_class(shards: Path) -> None:
    shown = kway_shard("show", shards)
    assert shown.exit_code == 0, shown.output
    assert "images of 4 classes, from imagefolder" in " ".join(shown.stdout.split())
    for name, count in (("apple", 9), ("birne", 10), ("crème", 11), ("date", 12)):
        (line,) = (line for line in shown.stdout.splitlines() if name in line)
        assert line.split()[1] == str(count)
        assert "█" in line


def test_control_characters_of_texts_are_escaped(texts: Path) -> None:
    shown = kway_shard("show", texts).stdout
    assert "text of 0" in shown
    assert "text of 39 [bold]U+001B[31mU+202E" in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert len(table_cell("x" * 99, 10)) == 10


def test_a_contact_sheet_has_each_image_above_its_class(tmp_path: Path) -> None:
    samples = []
    for number, color in enumerate(((255, 0, 0), (0, 0, 255))):
        solid = encoded(Image.new("RGB", (128, 64), color), "png")
        samples.append((solid, f"class {number} of a long, long, long, long name"))
    write_shards(samples, tmp_path / "out", original=True, test_fraction=0, workers=0)
    with open_split(tmp_path / "out", "train") as split:
        sheet = np.asarray(contact_sheet(split, 48))
    for left, color in ((10, (255, 0, 0)), (148, (0, 0, 255))):
        assert (sheet[26 + 32 : 26 + 96, left : left + 128] == color).all()
        caption = sheet[154:170, left : left + 138]
        assert (caption < 100).any()
        assert (caption[:, 131:] == 255).all()  # does not overlap the next tile


def test_a_damaged_image_is_drawn_as_a_crossed_tile(tmp_path: Path) -> None:
    shards = planted_shards(tmp_path / "out", {4: b"this is text"})
    with open_split(shards, "train") as split:
        sheet = np.asarray(contact_sheet(split, 30))
    centers = sheet[26 + 64 :: 154, 10 + 64 :: 138]
    assert (centers == (120, 120, 120)).all(-1).sum() == 1


def test_a_contact_sheet_is_a_png_of_images(texts: Path, tmp_path: Path) -> None:
    for name, message in (("a.jpg", "ends in .png"), ("a.png", "texts have no")):
        done = kway_shard("show", texts, "--contact-sheet", tmp_path / name)
        assert message in str(done.exception)
