"""The paths of classes in the hierarchy of a manifest, and invalid paths."""

from pathlib import Path

import pytest

from data.classes.class_list import ClassInfo
from data.shards.hierarchy import MAX_DEPTH, MAX_NAME, class_paths, join_path
from data.shards.manifest import Manifest, ShardInfo, SourceInfo

FOLDER = Path("shards")


def manifest(*paths: str | None) -> Manifest:
    """Return a manifest of classes c0, c1, … with these `path` attributes."""
    shard = ShardInfo(
        file="a.tar", split="train", samples=1, bytes=1024, sha256="0" * 64, index_crc32=0
    )
    classes = tuple(
        ClassInfo(name=f"c{i}", attributes={} if path is None else {"path": path})
        for i, path in enumerate(paths)
    )
    return Manifest(source=SourceInfo(kind="made up"), classes=classes, shards=(shard,))


def test_class_paths_returns_the_joined_names() -> None:
    paths = [("animal",), ("animal", "dog, domestic dog"), ("Smileys & Emotion", "a>b")]
    found = class_paths(FOLDER, manifest(*map(join_path, paths), None))
    assert [found.distinct[number] for number in found.of_class] == [*paths, ()]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a > b", "c"), "has a name that contains ' > '"),
        (("a >", "b"), "has a name that contains ' > '"),
        ((), "a name is empty"),
    ],
)
def test_invalid_names_in_a_path_raise(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        join_path(names)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a > b > a", "'a' is its own ancestor"),
        (" > ".join(map(str, range(MAX_DEPTH + 1))), "101 names, over the limit of 100"),
        ("x" * (MAX_NAME + 1), "has 1,001 characters, over the limit of 1,000"),
        ("a >  > b", "a name is empty"),
    ],
)
def test_an_invalid_path_in_a_manifest_raises_an_error_that_names_the_class(
    path: str, message: str
) -> None:
    with pytest.raises(ValueError, match=f"path of class 'c1': .*{message}") as error:
        class_paths(FOLDER, manifest("a", path))
    assert len(str(error.value)) < 300
