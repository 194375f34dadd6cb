"""Label trees from parent tables, paths and WordNet."""

from pathlib import Path

import numpy as np
import pytest

from heads.tree import NamedTree, label_tree_of_paths, read_parent_table, read_wordnet
from tests.heads.wordnet_files import write_wordnet


def write_table(folder: Path, *rows: str, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def paths(named: NamedTree) -> dict[str, list[str]]:
    """Names from the root down to each class."""
    pseudoclasses = iter(named.pseudoclasses)
    names = [
        next(pseudoclasses) if class_id < 0 else named.classes[class_id]
        for class_id in named.tree.class_of_node
    ]
    return {
        name: [names[node] for node in named.tree.ancestors(int(named.tree.node_of_class[i]))]
        for i, name in enumerate(named.classes)
    }


ANIMALS = ["dog,pet", "cat,pet", "pet,animal", "ant,insect", "insect,animal", "animal,", "oak,tree"]


def test_inner_names_become_pseudoclasses_and_leaves_become_classes(tmp_path):
    hierarchy = read_parent_table(write_table(tmp_path, *ANIMALS))
    assert hierarchy.leaves() == ["dog", "cat", "ant", "oak"]
    named = hierarchy.tree(hierarchy.leaves(), collapse=False)
    assert paths(named) == {
        "dog": ["animal", "pet"],
        "cat": ["animal", "pet"],
        "ant": ["animal", "insect"],
        "oak": ["tree"],
    }
    assert sorted(named.pseudoclasses) == ["animal", "insect", "pet", "tree"]


def test_chains_are_collapsed_by_default(tmp_path):
    hierarchy = read_parent_table(write_table(tmp_path, "root,top", *ANIMALS, "animal,root"))
    with_chains = hierarchy.tree(["dog", "cat", "ant"], collapse=False)
    assert paths(with_chains)["ant"] == ["top", "root", "animal", "insect"]
    named = hierarchy.tree(["dog", "cat", "ant"])
    assert paths(named) == {"dog": ["animal", "pet"], "cat": ["animal", "pet"], "ant": ["animal"]}
    assert paths(hierarchy.tree(["dog"])) == {"dog": []}


def test_a_class_above_other_classes_is_a_leaf_under_its_own_pseudoclass(tmp_path):
    named = read_parent_table(write_table(tmp_path, *ANIMALS)).tree(["pet", "dog", "animal"])
    assert paths(named) == {
        "pet": ["animal", "pet"],
        "dog": ["animal", "pet"],
        "animal": ["animal"],
    }


def test_the_first_of_several_parents_is_used(tmp_path):
    path = write_table(tmp_path, "cat,wild", "cat,pet", "dog,pet", "dog,pet", "pet,", "wild,pet")
    hierarchy = read_parent_table(path)
    assert hierarchy.num_with_several_parents() == 1
    named = hierarchy.tree(["cat", "dog"], collapse=False)
    assert paths(named) == {"cat": ["pet", "wild"], "dog": ["pet"]}


def test_headers_tabs_quotes_and_blank_lines_are_supported(tmp_path):
    rows = ["Parent\tnote\tChild", "pet\tx\tdog", "", 'pet\t\t"big, cat"']
    hierarchy = read_parent_table(write_table(tmp_path, *rows, name="table.tsv"))
    assert paths(hierarchy.tree(["big, cat", "dog"])) == {"big, cat": ["pet"], "dog": ["pet"]}


@pytest.mark.parametrize(
    ("rows", "classes", "message"),
    [
        (["a,b", "b,c", "c,a"], ["a"], "cycle: 'a' is both above and below 'c'"),
        (["a,b"], ["a", "z"], "class 'z' is not in .*table.csv"),
        (["a,b"], ["a", "a"], "'a' is in the class list twice"),
        (["a,b", "c"], ["a"], "line 2 is invalid"),
        (["a,b", ",b"], ["a"], "line 2 is invalid"),
        (["child,parent"], ["a"], "is empty"),
    ],
)
def test_an_invalid_table_raises_a_one_line_error(tmp_path, rows, classes, message):
    with pytest.raises(ValueError, match=message) as error:
        read_parent_table(write_table(tmp_path, *rows)).tree(classes)
    assert "\n" not in str(error.value)


def test_a_name_may_occur_in_several_paths():
    above = [("bird", "crane"), ("bird", "crane"), ("machine", "crane"), ("machine",), ()]
    named, collapsed = (
        NamedTree(tree, ("sarus", "demoiselle", "tower", "lathe", "idea"), names)
        for tree, names in (
            label_tree_of_paths(above, np.arange(5), collapse=collapse)
            for collapse in (False, True)
        )
    )
    assert list(paths(named).values()) == [list(path) for path in above]
    assert sorted(named.pseudoclasses) == ["bird", "crane", "crane", "machine"]
    assert paths(collapsed) == {
        "sarus": ["crane"],
        "demoiselle": ["crane"],
        "tower": ["machine"],
        "lathe": ["machine"],
        "idea": [],
    }


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    return write_wordnet(tmp_path)


def test_the_tree_uses_the_first_hypernym_of_each_synset(wordnet):
    named = read_wordnet(wordnet).tree(["poodle", "Rex", "crane"], collapse=False)
    above = ["entity", "animal", "carnivore", "dog"]
    assert paths(named) == {"poodle": above, "Rex": above, "crane": ["entity", "animal"]}
    collapsed = read_wordnet(wordnet).tree(["poodle", "Rex", "crane"])
    assert paths(collapsed)["poodle"] == ["animal", "dog"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("n00000006", 6),
        ("n00000006_poodle", 6),
        ("Domestic dog", 5),
        ("crane", 9),
        ("crane.n.02", 8),
        ("unknown word, poodle", 6),
    ],
)
def test_wordnet_names_are_synsets_senses_or_words(wordnet, name, expected):
    assert read_wordnet(wordnet).synset(name) == f"n{expected:08d}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unicorn", "class 'unicorn' is not a noun in WordNet"),
        ("crane.n.03", "class 'crane.n.03' is not a noun"),
        ("n00000099", "class 'n00000099' is not in WordNet"),
    ],
)
def test_an_unknown_wordnet_name_raises_a_one_line_error(wordnet, name, message):
    with pytest.raises(ValueError, match=message) as error:
        read_wordnet(wordnet).tree([name])
    assert "\n" not in str(error.value)


def test_errors_name_the_damaged_wordnet_file(wordnet):
    data = wordnet / "data.noun"
    text = data.read_text()
    data.write_text(text[: text.rindex(" n 0000")])
    with pytest.raises(ValueError, match=r"data\.noun, line \d+ is not a synset"):
        read_wordnet(wordnet)
    data.write_text("\n".join(line for line in text.split("\n") if "entity" not in line))
    with pytest.raises(ValueError, match="no synset n00000001"):
        read_wordnet(wordnet)
    data.write_text(text)
    (wordnet / "index.noun").unlink()
    with pytest.raises(FileNotFoundError, match=r"index\.noun does not exist"):
        read_wordnet(wordnet)
