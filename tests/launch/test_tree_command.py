"""`kway tree`: tree files from each kind of source, and one-line errors."""

from pathlib import Path

import numpy as np
import pytest

from data.shards.manifest import Manifest
from data.shards.writing.writer import write_shards
from data.sources import ImageFolder, ImageNet
from heads.tree import NamedTree
from tests.data import ilsvrc
from tests.data.conftest import write_image
from tests.heads.wordnet_files import write_wordnet


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    rows = np.random.default_rng(0).normal(size=(60, 4))
    np.savez(tmp_path / "v.npz", vectors=rows, names=[f"class {i}" for i in range(60)])
    return tmp_path / "v.npz"


def test_a_tree_is_built_from_vectors(kway, vectors, tmp_path, capsys):
    out = tmp_path / "a.tree"
    assert kway("tree", "build", vectors, "-o", out, "--base", 1.5) == 0
    output = capsys.readouterr().out
    assert "60 classes" in output
    assert "depth of classes" in output
    assert NamedTree.load(out).classes[7] == "class 7"


def test_a_tree_is_built_from_the_vectors_of_shards(kway, glyphs, tmp_path):
    assert kway("tree", "build", glyphs, "-o", tmp_path / "a.tree", "--kind", "utree") == 0
    named = NamedTree.load(tmp_path / "a.tree")
    assert named.classes == tuple(info.name for info in Manifest.load(glyphs).classes)
    assert named.tree.num_nodes == len(named.classes)


def test_a_tree_is_built_from_the_hierarchy_of_shards_if_requested(kway, glyphs, tmp_path, capsys):
    assert kway("tree", "build", glyphs, "-o", tmp_path / "v.tree") == 0
    assert "built from the label vectors" in capsys.readouterr().out
    assert kway("tree", "build", glyphs, "-o", tmp_path / "h.tree", "--from", "hierarchy") == 0
    assert "built from the hierarchy" in capsys.readouterr().out
    named = NamedTree.load(tmp_path / "h.tree")
    assert named.classes == Manifest.load(glyphs).class_names
    assert "Basic Latin" in " ".join(named.pseudoclasses)


def test_a_tree_is_built_from_wordnet_for_shards_of_synset_folders(kway, tmp_path, capsys):
    for i, name in enumerate(("n00000006_poodle", "n00000007", "crane.n.01", "n00000004")):
        write_image(tmp_path / "in" / name / "0.png", i)
    source = ImageFolder(tmp_path / "in", test_fraction=0)
    write_shards(source, tmp_path / "out", workers=0)
    wordnet = write_wordnet(tmp_path / "dict")
    options = ("-o", tmp_path / "a.tree", "--classes", tmp_path / "out")
    assert kway("tree", "build", wordnet, *options) == 0
    assert "4 classes, 2 pseudoclasses" in capsys.readouterr().out
    assert len(NamedTree.load(tmp_path / "a.tree").pseudoclasses) == 2
    assert kway("tree", "build", wordnet, *options, "--keep-chains") == 0
    assert len(NamedTree.load(tmp_path / "a.tree").pseudoclasses) == 4


def test_vectors_of_synset_classes_are_found_by_their_words(kway, tmp_path):
    write_shards(ImageNet(ilsvrc.write_tars(tmp_path / "in")), tmp_path / "out", workers=0)
    names = ["English setter", "tench", "kit fox"]
    np.savez(tmp_path / "v.npz", vectors=np.eye(3), names=names)
    options = ("-o", tmp_path / "a.tree", "--classes", tmp_path / "out")
    assert kway("tree", "build", tmp_path / "v.npz", *options) == 0
    assert NamedTree.load(tmp_path / "a.tree").classes == ilsvrc.CLASSES


def test_shards_without_hierarchy_or_vectors_are_rejected(error_of, images, tmp_path):
    command = ("tree", "build", images, "-o", tmp_path / "a.tree")
    assert "source imagefolder does not provide a hierarchy" in error_of(*command)
    assert "does not provide label vectors" in error_of(*command, "--from", "vectors")


def test_class_names_select_vectors_and_missing_names_are_reported(kway, vectors, tmp_path, capsys):
    (tmp_path / "names.txt").write_text("class 3\nokapi\nCLASS_5\n")
    options = ("-o", tmp_path / "a.tree", "--classes", tmp_path / "names.txt")
    assert kway("tree", "build", vectors, *options) == 2
    assert "('okapi')" in capsys.readouterr().err
    assert kway("tree", "build", vectors, *options, "--missing", "mean") == 0
    assert "1 class names have no vector" in capsys.readouterr().err
    assert NamedTree.load(tmp_path / "a.tree").classes == ("class 3", "okapi", "CLASS_5")


def test_a_tree_is_built_from_a_parent_table(kway, tmp_path, capsys):
    (tmp_path / "t.csv").write_text("dog,pet\ncat,pet\ncat,wild\npet,\n")
    assert kway("tree", "build", tmp_path / "t.csv", "-o", tmp_path / "a.tree") == 0
    assert "1 names" in capsys.readouterr().err
    named = NamedTree.load(tmp_path / "a.tree")
    assert (named.classes, named.pseudoclasses) == (("dog", "cat"), ("pet",))


def test_an_almost_flat_tree_prints_a_warning_and_projection_fixes_it(kway, tmp_path, capsys):
    np.save(tmp_path / "v.npy", np.random.default_rng(1).normal(size=(300, 200)))
    (tmp_path / "names.txt").write_text("\n".join(map(str, range(300))))
    options = ("-o", tmp_path / "a.tree", "--classes", tmp_path / "names.txt")
    assert kway("tree", "build", tmp_path / "v.npy", *options) == 0
    assert "almost flat" in (warning := capsys.readouterr().err)
    assert "--project 16" in warning
    assert kway("tree", "build", tmp_path / "v.npy", *options, "--project", 8) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "gone.npy", "-o", "a.tree"], "gone.npy does not exist"),
        (["build", "v.npy", "-o", "a.tree"], "no class names: pass them with --classes"),
        (
            ["build", "t.csv", "-o", "a.tree", "--project", "3", "--base", "1.5"],
            "--base, --project cannot be used with a hierarchy, which t.csv contains",
        ),
        (["build", "t.csv", "-o", "n.txt/a.tree"], "choose another path with --out"),
        (["build", "t.csv", "-o", "full.tree"], "full.tree cannot be written (Is a directory)"),
        (["build", "t.csv", "-o", "a.tree", "--classes", "n.txt"], "class '0' is not in t.csv"),
        (
            ["build", "v.npy", "-o", "a.tree", "--classes", "n.txt", "--keep-chains"],
            "--keep-chains",
        ),
        (["build", "v.npy", "-o", "a.tree", "--from", "hierarchy"], "--from cannot be used with"),
        (["build", "v.npy", "-o", "a.tree", "--classes", "twice.txt"], "twice.txt"),
        (["build", ".", "-o", "a.tree", "--classes", "n.txt"], "is neither shards nor"),
    ],
)
def test_invalid_arguments_print_a_one_line_error(
    error_of, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    np.save("v.npy", np.ones((2, 2)))
    Path("t.csv").write_text("a,b\n")
    Path("n.txt").write_text("0\n1\n")
    Path("full.tree.part").mkdir()
    Path("twice.txt").write_text("a\na\n")
    assert message in error_of("tree", *arguments)
    assert not Path("a.tree").exists()
