"""`kway tree`: from each kind of source to a tree file and a picture, and its one-line errors."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data import Manifest
from heads.tree import NamedTree
from launch.main import main

Kway = Callable[..., int]


@pytest.fixture
def kway(monkeypatch: pytest.MonkeyPatch) -> Kway:
    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["kway", "tree", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return run


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    rows = np.random.default_rng(0).normal(size=(60, 4))
    np.savez(tmp_path / "v.npz", vectors=rows, names=[f"class {i}" for i in range(60)])
    return tmp_path / "v.npz"


def test_vectors_become_a_tree_that_show_draws(kway, vectors, tmp_path, capsys):
    out = tmp_path / "a.tree"
    assert kway("build", vectors, "-o", out, "--base", 1.5) == 0
    assert "60 classes" in capsys.readouterr().out
    assert NamedTree.load(out).classes[7] == "class 7"
    assert kway("show", out) == 0
    assert "depth of classes" in capsys.readouterr().out
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_the_vectors_of_shards_become_a_tree_of_their_classes(kway, glyphs, tmp_path):
    assert kway("build", glyphs, "-o", tmp_path / "a.tree", "--kind", "utree") == 0
    named = NamedTree.load(tmp_path / "a.tree")
    assert named.classes == tuple(info.name for info in Manifest.load(glyphs).classes)
    assert named.tree.num_nodes == len(named.classes)


def test_class_names_choose_from_a_file_and_missing_ones_are_reported(
    kway, vectors, tmp_path, capsys
):
    (tmp_path / "names.txt").write_text("class 3\nokapi\nCLASS_5\n")
    options = ("-o", tmp_path / "a.tree", "--classes", tmp_path / "names.txt")
    assert kway("build", vectors, *options) == 2
    assert "('okapi')" in capsys.readouterr().err
    assert kway("build", vectors, *options, "--missing", "mean") == 0
    assert "1 class names have no vector" in capsys.readouterr().err
    assert NamedTree.load(tmp_path / "a.tree").classes == ("class 3", "okapi", "CLASS_5")


def test_a_parent_table_becomes_a_tree(kway, tmp_path, capsys):
    (tmp_path / "t.csv").write_text("dog,pet\ncat,pet\ncat,wild\npet,\n")
    assert kway("build", tmp_path / "t.csv", "-o", tmp_path / "a.tree", "--collapse") == 0
    assert "1 names" in capsys.readouterr().err
    named = NamedTree.load(tmp_path / "a.tree")
    assert (named.classes, named.pseudoclasses) == (("dog", "cat"), ("pet",))


def test_a_near_trivial_tree_warns_and_a_projection_mends_it(kway, tmp_path, capsys):
    np.save(tmp_path / "v.npy", np.random.default_rng(1).normal(size=(300, 200)))
    (tmp_path / "names.txt").write_text("\n".join(map(str, range(300))))
    options = ("-o", tmp_path / "a.tree", "--classes", tmp_path / "names.txt")
    assert kway("build", tmp_path / "v.npy", *options) == 0
    assert "near-trivial" in (warning := capsys.readouterr().err)
    assert "--project 16" in warning
    assert kway("build", tmp_path / "v.npy", *options, "--project", 8) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "gone.npy", "-o", "a.tree"], "gone.npy does not exist"),
        (["build", "v.npy", "-o", "a.tree"], "names no classes: give them with --classes"),
        (["build", "t.csv", "-o", "a.tree", "--project", "3"], "t.csv is a hierarchy"),
        (["build", "t.csv", "-o", "a.tree", "--classes", "n.txt"], "class '0' is not in t.csv"),
        (["build", "v.npy", "-o", "a.tree", "--classes", "n.txt", "--collapse"], "--collapse"),
        (["build", "v.npy", "-o", "a.tree", "--classes", "gone.txt"], "gone.txt do not exist"),
        (["build", ".", "-o", "a.tree", "--classes", "n.txt"], "has no config.json"),
        (["show", "n.txt"], "no sound tree file"),
    ],
)
def test_mistakes_are_one_line(kway, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    np.save("v.npy", np.ones((2, 2)))
    Path("t.csv").write_text("a,b\n")
    Path("n.txt").write_text("0\n1\n")
    assert kway(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("a.tree").exists()
