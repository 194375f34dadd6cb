"""The tables of `kway demo`. test_commands.py tests the complete demo."""

from pathlib import Path

from data.shards.split import open_split
from launch.commands.demo import make_queries


def test_the_first_image_is_queried_for_its_own_class(glyphs: Path, tmp_path: Path) -> None:
    queries = make_queries(glyphs, tmp_path)
    with open_split(glyphs, "test") as split:
        contents = [split.read(index) for index in range(len(split))]
        names = [info.name for info in split.classes]
    classes = {content: names[label] for content, _, label in contents}
    for image, true_class, _ in queries:
        assert classes[image.read_bytes()] == true_class
    assert [queried == true_class for _, true_class, queried in queries] == [True, False, False]
