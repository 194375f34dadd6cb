"""Where classes of a manifest stand in a hierarchy, and what is no sound path."""

from pathlib import Path

import pytest

from data.shards.hierarchy import (
    MAX_DEPTH,
    MAX_NAME,
    HierarchySize,
    class_paths,
    hierarchy_size,
    join_path,
)
from data.shards.manifest import ClassInfo, Manifest, ShardInfo, SourceInfo

FOLDER = Path("shards")


def manifest(*paths: str | None) -> Manifest:
    """Classes c0, c1, … with these attributes `path`."""
    shard = ShardInfo(
        file="a.tar", split="train", samples=1, bytes=1024, sha256="0" * 64, index_crc32=0
    )
    classes = tuple(
        ClassInfo(name=f"c{i}", attributes={} if path is None else {"path": path})
        for i, path in enumerate(paths)
    )
    return Manifest(source=SourceInfo(kind="made up"), classes=classes, shards=(shard,))


def test_a_path_comes_back_as_it_was_joined() -> None:
    paths = [("animal",), ("animal", "dog, domestic dog"), ("Smileys & Emotion", "a>b")]
    found = class_paths(FOLDER, manifest(*map(join_path, paths), None))
    assert found == [*paths, ()]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a > b", "c"), "has a name with ' > ' in it: rename it"),
        (("a >", "b"), "has a name with ' > ' in it"),
        (("a", ""), "a name is empty"),
        ((), "a name is empty"),
        (("a", "b", "a"), "'a' is above itself"),
    ],
)
def test_names_that_a_path_cannot_hold_are_refused(names: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        join_path(names)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("a > b > a", "'a' is above itself"),
        (" > ".join(map(str, range(MAX_DEPTH + 1))), "101 names, and the most is 100"),
        ("x" * (MAX_NAME + 1), "has 1,001 characters, and the most is 1,000"),
        ("a >  > b", "a name is empty"),
        ("", "a name is empty"),
    ],
)
def test_a_manifest_from_elsewhere_is_refused_with_the_class(path: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"path of class 'c1': .*{said}.*make the shards") as error:
        class_paths(FOLDER, manifest("a", path))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_its_size_counts_a_name_once_for_each_place_it_stands_in() -> None:
    size = hierarchy_size(FOLDER, manifest("bird > crane", "machine > crane", "machine", None))
    assert size == HierarchySize(classes=3, nodes=4, depth=2)
    assert str(size) == "3 classes under 4 nodes, at most 2 deep"


def test_without_a_path_there_is_no_hierarchy() -> None:
    assert hierarchy_size(FOLDER, manifest(None, None)) is None
    with pytest.raises(ValueError, match=r"shards has no hierarchy: source made up gives none"):
        class_paths(FOLDER, manifest(None, None))
