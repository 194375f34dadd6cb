"""Tree files, their statistics and figures, and heads built from them."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from heads.build import build_head, build_tree
from heads.config import HeadConfig
from heads.tree import LabelTree, NamedTree, build_cover_tree
from heads.tree.named_tree import load_tree
from heads.tree.statistics import largest_family_share, statistics_of

NAMES = tuple(f"class {i}" for i in range(40))
ROWS = np.random.default_rng(0).normal(size=(40, 3))


@pytest.fixture
def named() -> NamedTree:
    return NamedTree.of_cover_tree(build_cover_tree(ROWS), NAMES, "vtree")


def config(kind: str, path: Path) -> HeadConfig:
    return HeadConfig.model_validate({"weights": {"kind": kind, "tree": {"file": str(path)}}})


@pytest.mark.parametrize("kind", ["vtree", "utree"])
def test_a_tree_file_restores_the_tree_and_its_names(tmp_path, kind):
    named = NamedTree.of_cover_tree(build_cover_tree(ROWS), NAMES, kind)
    named.save(tmp_path / "new" / "a.tree")
    loaded = NamedTree.load(tmp_path / "new" / "a.tree")
    assert loaded.tree.digest() == named.tree.digest()
    assert (loaded.classes, loaded.pseudoclasses) == (named.classes, named.pseudoclasses)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.tree"]


def positions(names):
    """Return a function that finds the classes `names` among those of a tree."""

    def find(text: np.ndarray, ends: np.ndarray) -> np.ndarray:
        starts = [0, *ends.tolist()]
        of_tree = [text[a:b].tobytes().decode() for a, b in pairwise(starts)]
        return np.array([of_tree.index(name) if name in of_tree else -1 for name in names])

    return find


def test_a_tree_with_other_classes_is_a_one_line_error(named, tmp_path):
    named.save(tmp_path / "a.tree")
    with pytest.raises(ValueError, match="contain 1 classes of the data, such as class 39"):
        load_tree(tmp_path / "a.tree", 40, positions((*NAMES[1:], "zebra")))


def test_damaged_tree_files_are_rejected(named, tmp_path):
    path = tmp_path / "a.tree"
    with pytest.raises(FileNotFoundError, match=r"a\.tree does not exist"):
        NamedTree.load(path)
    named.save(path)
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-8 * 20] ^= 1
    for broken in (b"hello", content[:-5], bytes(flipped)):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="not a valid tree file") as error:
            NamedTree.load(path)
        assert "\n" not in str(error.value)
    save_file({"vectors": np.ones((2, 2))}, path)
    with pytest.raises(ValueError, match="does not contain format="):
        NamedTree.load(path)


def test_a_head_matches_the_classes_of_a_tree_file_by_name_or_number(named, tmp_path):
    named.save(tmp_path / "a.tree")
    given = config("vtree", tmp_path / "a.tree")
    options = {"num_classes": 40, "label_vectors": None}
    assert build_tree(given, **options).digest() == named.tree.digest()
    backwards = build_tree(given, **options, tree_positions=positions(NAMES[::-1]))
    assert backwards.digest() == build_cover_tree(ROWS[::-1]).vtree().digest()
    head = build_head(
        given,
        dim=4,
        mesh=None,
        seed=0,
        device="cpu",
        tree_positions=positions(NAMES[::-1]),
        **options,
    )
    assert head.tree.digest() == backwards.digest()


def test_a_tree_file_with_other_classes_or_of_another_kind_is_rejected(named, tmp_path):
    path = tmp_path / "a.tree"
    named.save(path)
    with pytest.raises(ValueError, match="has 40 classes, but the data have 41"):
        build_tree(config("vtree", path), num_classes=41, label_vectors=None)
    with pytest.raises(ValueError, match=r"is not a utree: set head\.weights\.kind=vtree"):
        build_tree(config("utree", path), num_classes=40, label_vectors=None)
    NamedTree.of_cover_tree(build_cover_tree(ROWS), NAMES, "utree").save(path)
    with pytest.raises(ValueError, match=r"is not a vtree: set head\.weights\.kind=utree"):
        build_tree(config("vtree", path), num_classes=40, label_vectors=None)
    tree = build_tree(config("utree", path), num_classes=40, label_vectors=None)
    assert tree.digest() == build_cover_tree(ROWS).utree().digest()


def test_statistics_count_nodes_classes_and_families():
    #        6
    #    4       5
    #  0  1    2  3
    tree = LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1], [0, 1, 2, 3, -1, -1, -1])
    assert largest_family_share(tree) == pytest.approx(2 / 7)
    assert statistics_of(tree) == [
        "4 classes, 3 pseudoclasses, 7 nodes",
        "depth of classes: median 2, largest 2",
        "children per node: median 2, largest 2 (29% of all nodes in one family)",
    ]
    assert "median 3, largest 3 (100%" in statistics_of(LabelTree.dense(3))[2]


def test_names_must_match_the_tree(named):
    cover = build_cover_tree(ROWS)
    with pytest.raises(ValueError, match="40 classes, but 2 class names"):
        NamedTree.of_cover_tree(cover, ["a", "b"], "vtree")
    with pytest.raises(ValueError, match="'a' is in the class list twice"):
        NamedTree.of_cover_tree(cover, ["a"] * 40, "vtree")
    with pytest.raises(ValueError, match="pseudoclasses, but 0 names"):
        NamedTree(named.tree, named.classes, ())
