"""The attributes of classes whose synsets have several words or parents."""

from dataclasses import dataclass

import pytest

from data.sources.taxonomy import ClassTaxonomy


@dataclass
class Synsets:
    """A taxonomy of ID -> (words, parents). A class is named by its ID."""

    known: dict[str, tuple[str, tuple[str, ...]]]
    origin: str = "Synsets"

    def synset(self, class_name: str) -> str:
        return class_name

    def words(self, synset: str) -> str:
        return self.known[synset][0]

    def parents(self, synset: str) -> tuple[str, ...]:
        return self.known[synset][1]


SYNSETS = Synsets(
    {
        "n1": ("entity", ()),
        "n2": ("animal, beast", ("n1",)),
        "n3": ("carnivore", ("n2",)),
        "n4": ("pet", ("n2",)),
        "n5": ("dog, domestic dog", ("n3", "n4")),
        "n6": ("poodle", ("n5",)),
        "n7": ("crane", ("n1",)),
        "n8": ("crane", ("n1",)),
        "n9": ("tower crane", ("n7",)),
        "n10": ("sarus crane", ("n8",)),
        "n11": ("entity", ("n2",)),
        "n12": ("soul", ("n11",)),
    }
)


def paths(*names: str) -> list[str | None]:
    return [about.get("path") for about in ClassTaxonomy(SYNSETS, names).attributes()]


def test_a_class_has_words_parents_and_the_path_through_the_first_parent() -> None:
    assert ClassTaxonomy(SYNSETS, ["n5"]).attributes() == [
        {
            "words": "dog, domestic dog",
            "parents": "n3 n4",
            "path": "entity > animal > carnivore",
        }
    ]
    assert ClassTaxonomy(SYNSETS, ["n1"]).attributes() == [{"words": "entity"}]


def test_a_class_above_or_equal_to_another_is_part_of_its_own_path() -> None:
    assert paths("n5", "n6") == ["entity > animal > carnivore > dog"] * 2
    assert paths("n6") == ["entity > animal > carnivore > dog"]
    assert paths("n6", "n6") == ["entity > animal > carnivore > dog > poodle"] * 2


def test_ambiguous_node_names_include_the_synset() -> None:
    assert paths("n9", "n10") == ["entity > crane (n7)", "entity > crane (n8)"]
    assert paths("n9") == ["entity > crane"]
    assert paths("n12") == ["entity > animal > entity (n11)"]


def test_a_choice_among_parents_is_noted() -> None:
    (note,) = ClassTaxonomy(SYNSETS, ["n6", "n9"]).notes()
    assert note.startswith("1 synsets of the hierarchy have several parents")
    assert "the first one in Synsets" in note
    assert ClassTaxonomy(SYNSETS, ["n9"]).notes() == []


def test_ancestors_are_looked_up_once_for_attributes_and_notes() -> None:
    lookups: list[str] = []

    class Counting(Synsets):
        def synset(self, class_name: str) -> str:
            lookups.append(class_name)
            return class_name

    taxonomy = ClassTaxonomy(Counting(SYNSETS.known), ["n5", "n9"])
    assert taxonomy.attributes() == taxonomy.attributes()
    assert len(taxonomy.notes()) == 1
    assert lookups == ["n5", "n9"]


def test_a_cycle_raises_an_error_that_names_the_synset() -> None:
    circle = Synsets({"a": ("a", ("b",)), "b": ("b", ("c",)), "c": ("c", ("b",))})
    with pytest.raises(ValueError, match="Synsets: b, an ancestor of class a, is its own ancestor"):
        ClassTaxonomy(circle, ["a"]).attributes()
