"""`kway tree`: tree files from each kind of source, and one-line errors."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from data.shards.manifest import Manifest
from data.shards.writing.writer import write_shards
from data.sources import ImageFolder
from heads.tree import NamedTree, read_wordnet
from launch.commands.shard import app
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
    assert "built from label vectors" in capsys.readouterr().out
    assert kway("tree", "build", glyphs, "-o", tmp_path / "h.tree", "--from", "hierarchy") == 0
    assert "built from the hierarchy" in capsys.readouterr().out
    named = NamedTree.load(tmp_path / "h.tree")
    assert named.classes == Manifest.load(glyphs).class_names
    assert "Basic Latin" in " ".join(named.pseudoclasses)


def test_a_tree_is_built_from_shards_of_synset_folders(kway, tmp_path, capsys):
    for i, name in enumerate(("n00000006_poodle", "n00000007", "crane.n.01", "n00000004")):
        write_image(tmp_path / "in" / name / "0.png", i)
    wordnet = write_wordnet(tmp_path / "dict")
    options = ("--wordnet", wordnet, "--test-fraction", 0, "--workers", 0)
    source = ImageFolder(tmp_path / "in", test_fraction=0, taxonomy=read_wordnet(wordnet))
    arguments = map(str, ("imagefolder", tmp_path / "in", "-o", tmp_path / "out", *options))
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 0, done.output
    assert "1 synsets of the hierarchy have several parents" in done.stderr
    assert Manifest.load(tmp_path / "out").classes == source.classes()
    assert kway("tree", "build", tmp_path / "out", "-o", tmp_path / "a.tree") == 0
    assert "4 classes, 2 pseudoclasses" in capsys.readouterr().out
    assert NamedTree.load(tmp_path / "a.tree").pseudoclasses == ("animal", "dog")
    assert kway("tree", "build", tmp_path / "out", "-o", tmp_path / "a.tree", "--keep-chains") == 0
    assert NamedTree.load(tmp_path / "a.tree").pseudoclasses == (
        "entity",
        "animal",
        "carnivore",
        "dog",
    )


def test_vectors_of_synset_classes_are_found_by_their_words(kway, tmp_path):
    for i, name in enumerate(("n00000006", "n00000005")):
        write_image(tmp_path / "in" / name / "0.png", i)
    taxonomy = read_wordnet(write_wordnet(tmp_path / "dict"))
    source = ImageFolder(tmp_path / "in", test_fraction=0, taxonomy=taxonomy)
    write_shards(source, tmp_path / "out", workers=0)
    (tmp_path / "glove.txt").write_text("poodle 1 0\ndog 0 1\n")
    options = ("-o", tmp_path / "a.tree", "--classes", tmp_path / "out")
    assert kway("tree", "build", tmp_path / "glove.txt", *options) == 0
    assert NamedTree.load(tmp_path / "a.tree").classes == ("n00000005", "n00000006")


def test_shards_without_hierarchy_or_vectors_are_rejected(kway, images, tmp_path, capsys):
    assert kway("tree", "build", images, "-o", tmp_path / "a.tree") == 2
    assert "source imagefolder does not provide a hierarchy" in capsys.readouterr().err
    assert kway("tree", "build", images, "-o", tmp_path / "a.tree", "--from", "vectors") == 2
    assert "does not provide label vectors" in capsys.readouterr().err


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
            "--base, --project: only for label vectors, but t.csv contains a hierarchy",
        ),
        (["build", ".", "-o", "a.tree", "--missing", "zero"], "--missing: only for files of"),
        (["build", "t.csv", "-o", "n.txt/a.tree"], "choose another path with --out"),
        (["build", "t.csv", "-o", "full.tree"], "full.tree cannot be written (Is a directory)"),
        (["build", "t.csv", "-o", "a.tree", "--classes", "n.txt"], "class '0' is not in t.csv"),
        (
            ["build", "v.npy", "-o", "a.tree", "--classes", "n.txt", "--keep-chains"],
            "--keep-chains",
        ),
        (["build", "v.npy", "-o", "a.tree", "--from", "hierarchy"], "v.npy contains vectors"),
        (["build", "v.npy", "-o", "a.tree", "--classes", "twice.txt"], "twice.txt"),
        (["build", ".", "-o", "a.tree", "--classes", "n.txt"], "has no config.json"),
    ],
)
def test_invalid_arguments_print_a_one_line_error(
    kway, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    np.save("v.npy", np.ones((2, 2)))
    Path("t.csv").write_text("a,b\n")
    Path("n.txt").write_text("0\n1\n")
    Path("full.tree.part").mkdir()
    Path("twice.txt").write_text("a\na\n")
    assert kway("tree", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("a.tree").exists()
