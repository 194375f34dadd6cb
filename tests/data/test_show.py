"""The output of `kway shard show`."""

from pathlib import Path

import pytest

from data.tars.indexing import index_shards
from launch.terminal import table_cell
from tests.data.conftest import kway_shard
from tests.data.foreign_tars import write_tar


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Index texts of 40 classes. Class k has k + 1 texts, and the texts of the last class contain
    control characters."""
    folder = tmp_path_factory.mktemp("texts")
    members, number = [], 0
    for label in range(40):
        for _ in range(label + 1):
            text = f"text of {label} [bold]\x1b[31m\u202e\n" if label == 39 else f"text of {label}"
            members += [
                (f"{number}.txt", text.encode()),
                (f"{number}.cls", f"class {label:02d}".encode()),
            ]
            number += 1
    write_tar(folder / "all.tar", members)
    index_shards(folder)
    return folder


def test_show_prints_the_count_of_every_class(shards: Path) -> None:
    shown = kway_shard("show", shards)
    assert shown.exit_code == 0, shown.output
    assert "images of 4 classes, from imagefolder" in " ".join(shown.stdout.split())
    for name, count in (("apple", 9), ("birne", 10), ("crème", 11), ("date", 12)):
        (line,) = (line for line in shown.stdout.splitlines() if name in line)
        assert line.split()[1] == str(count)
        assert "█" in line


def test_of_many_classes_the_largest_and_smallest_are_printed(texts: Path) -> None:
    shown = kway_shard("show", texts).stdout
    assert "class 39" in shown
    assert "class 00" in shown
    assert "class 20" not in shown.split("texts of train")[0]


def test_control_characters_of_texts_are_escaped(texts: Path) -> None:
    shown = kway_shard("show", texts).stdout
    assert "text of 0" in shown
    assert "text of 39 [bold]U+001B[31mU+202E" in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert len(table_cell("x" * 99, 10)) == 10
